"""What the user sees: the screen for our command alone, everything that libraries print in a log file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from rich.console import Console
from rich.text import Text

LOG_TAIL = 15
_PLAIN_WIDTH = 110
"""Columns where output goes to a file or a pipe."""


@contextmanager
def quiet(log: Path, descriptor: int) -> Iterator[Console]:
    """Send all output to ``log``; the console yielded writes where file descriptor ``descriptor`` pointed before.

    Both Python's streams and descriptors 1 and 2 are turned, because vLLM's C++ code prints too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # Never closed: loggers set up in here keep it and speak once more when the process ends.
    file = open(log, "w", buffering=1, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    try:
        for number in saved:
            os.dup2(file.fileno(), number)
        with (
            redirect_stdout(file),
            redirect_stderr(file),
            os.fdopen(os.dup(saved[descriptor]), "w", encoding="utf-8", errors="replace") as stream,
        ):
            yield Console(file=stream, highlight=False, width=None if stream.isatty() else _PLAIN_WIDTH)
    finally:
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)


class Steps:
    """Named steps with the seconds each took: a spinner on a terminal, one line a step elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show ``name`` as going on, then as done."""
        started = time.perf_counter()
        with self._console.status(f"{name} ..."):
            if not self._console.is_terminal:
                self._console.print(f"  {name} ...")
            yield
        self.seconds[name] = time.perf_counter() - started
        self._console.print(f"  {name}: {self.seconds[name]:.1f} s", style="dim")


class AnswerView:
    """Streams one answer; text that came several tokens a step is coloured."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        console.print(Text(f"{title}: ", style="bold"), end="")

    def write(self, text: str, tokens: int) -> None:
        """Append the text of one step."""
        self._console.print(Text(text, style="green" if tokens > 1 else ""), end="", soft_wrap=True)

    def close(self, summary: str) -> None:
        """End the answer with what it took."""
        self._console.print(Text(f"  [{summary}]", style="dim"))


def tail(log: Path, lines: int = LOG_TAIL) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
