"""The Markdown pages of the repository, and what stands in their fences.

A block of shell commands says behind its language how it is known to work:

=============  ========================================================================================
``run``        the test runs it (seconds; ``TARGET``, ``MODEL`` and ``HEAD`` are the demo's)
``by=FILE``    that test does the same with real engines
``setup``      a new clone begins with it; it cannot run inside itself
``long``       takes longer than a test may
``gpu``        needs a GPU
``network``    downloads, or wants data that does not come with the package
``cluster``    needs a cluster
``container``  builds or runs a container
=============  ========================================================================================

What is no command has another language: ``text`` for what is printed or drawn, ``json``, ``yaml``, ``python``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("", "docs/", "benchmarks/", "examples/", "tests/e2e/data/", "adaptivespec_vllm/demo/assets/*/")
PAGES = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}*.md"))
MARKS = ("run", "setup", "long", "gpu", "network", "cluster", "container")
LANGUAGES = ("bash", "text", "json", "yaml", "python", "dockerfile", "toml", "{toctree}")

_FENCE = re.compile(r"^( *)```(.*?)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`((?:adaptivespec|make) [^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, what is said of it, and its text."""

    page: str
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[str]:
        """Commands of a shell block, each on one line, without comments and assignments before them."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        for line in joined.splitlines():
            for command in re.split(r"\s+\|\s+|\s*&&\s*", line.strip()):
                command = re.sub(r"^(\w+=\S+ )+", "", command)
                if command and not command.startswith("#"):
                    yield command


def blocks(*languages: str) -> list[Block]:
    """Every block of all pages, or those of some languages."""
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            language, _, mark = match[2].strip().partition(" ")
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(str(path.relative_to(ROOT)), line, language, mark.strip(), match[3]))
    return [block for block in found if not languages or block.language in languages]


def spans() -> list[tuple[str, str]]:
    """Commands inside of sentences, with their page."""
    return [(str(path.relative_to(ROOT)), found) for path in PAGES for found in _SPAN.findall(path.read_text("utf-8"))]


def words(command: str) -> list[str]:
    """A command as a shell splits it; what a shell would substitute stays as it is."""
    return shlex.split(command, comments=True)
