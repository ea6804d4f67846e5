"""Writes what this package touches of vLLM, by version: ``tests/engine/vllm_symbols.json``, ``docs/vllm_compat.md``.

    python scripts/vllm_compat.py [DIRECTORY ...]

The installed vLLM is read, and each further tree of sources: a DIRECTORY with the package ``vllm`` in it, such as an
unpacked wheel. What is stored of versions that are not given stays. A symbol that was never looked at in a version has
no entry there; ``null`` says that it is gone.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_notes import NOTES, TRIED
from vllm_source import Source, fingerprint
from vllm_uses import Use, uses

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "tests" / "engine" / "vllm_symbols.json"
PAGE = ROOT / "docs" / "vllm_compat.md"

Fingerprints = Mapping[str, Mapping[str, str | None]]
"""Of each version (``0.32``) the fingerprint of each path."""

AREAS = {
    "Front end": tuple(
        f"vllm.{name}" for name in ("config", "engine", "v1.engine", "v1.metrics", "v1.core", "v1.struct")
    ),
    "V1 runner": tuple(
        f"vllm.v1.{name}" for name in ("worker.gpu_", "worker.cpu_", "worker.utils", "spec_decode", "sample")
    ),
    "V2 runner": ("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu."),
    "Attention": ("vllm.v1.attention", "vllm.vllm_flash_attn"),
    "Elsewhere": ("vllm",),
}


def installed() -> Source:
    """The sources of the installed vLLM, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm is not installed")
    return Source(Path(spec.origin).parents[1])


def stored() -> Fingerprints:
    fingerprints: Fingerprints = json.loads(STORED.read_text(encoding="utf-8"))
    return fingerprints


def fingerprints_of(source: Source, used: Iterable[Use]) -> dict[str, str | None]:
    found = {use.path: source.find(use.path) for use in used}
    return {path: None if definition is None else fingerprint(definition) for path, definition in found.items()}


def change(before: str | None, after: str | None) -> str:
    """What became of a symbol, in a word or two; "" for nothing."""
    if before == after:
        return ""
    if before is None:
        return "new"
    if after is None:
        return "gone"
    if before.split("/")[0] == after.split("/")[0]:
        return "body"
    return "signature" if "/" in before else "definition"


def page(used: list[Use], known: Fingerprints) -> str:
    """``docs/vllm_compat.md``."""
    first, *later = sorted(known)
    lines = [
        "# What is touched of vLLM",
        "",
        "<!-- written by scripts/vllm_compat.py -->",
        "",
        f"{len(used)} symbols, walked from the sources: what is imported, what a subclass overrides, and what it takes "
        "from itself that vLLM has put there; and what `engine/seams.py` and its neighbours list by hand, which is "
        "looked for when an engine starts. A test compares each with its fingerprint (code without comments, "
        "docstrings and layout), so an update of vLLM that changes one says which, and what it is used for, before "
        "anything runs.",
        "",
        "`body`: the code of a function changed, not how it is called. `signature`: how it is called, or its "
        "decorators. `definition`: what a class or a value declares, a new field for example.",
        "",
        f"The tests run on {first}.",
        "",
    ]
    for version in later:
        lines += [*_differences(used, known, first, version), TRIED.get(version, "Nothing has been run on it."), ""]
    for area, rows in _by_area(used):
        lines += [f"## {area}", "", "| symbol | what for | how, and where | " + " | ".join(later) + " |"]
        lines += ["|---|---|---|" + "---|" * len(later)]
        for use in rows:
            states = [_state(use.path, known, first, version) for version in later]
            lines.append(f"| `{_short(use.path)}` | {_why(use)} | {_how(use)} | " + " | ".join(states) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _differences(used: list[Use], known: Fingerprints, first: str, version: str) -> list[str]:
    states = {use.path: _state(use.path, known, first, version) for use in used}
    differing = [use for use in used if states[use.path] not in ("same", "not looked at")]
    same = sum(state == "same" for state in states.values())
    lines = [
        f"## {version} against {first}",
        "",
        f"{same} of {len(used)} are the same, {len(differing)} differ"
        + (f", {len(used) - same - len(differing)} were not looked at" if same + len(differing) < len(used) else "")
        + ". Nothing in the last column: only parts changed that this package neither sees nor relies on.",
        "",
        f"| symbol | what for | {version} | what that means here |",
        "|---|---|---|---|",
    ]
    for use in differing:
        note = NOTES.get(version, {}).get(use.path, "")
        lines.append(f"| `{_short(use.path)}` | {_why(use) or _how(use)} | {states[use.path]} | {note} |")
    return [*lines, ""]


def _state(path: str, known: Fingerprints, first: str, version: str) -> str:
    if path not in known[version]:
        return "not looked at"
    return change(known[first][path], known[version][path]) or "same"


def _by_area(used: list[Use]) -> list[tuple[str, list[Use]]]:
    rows: dict[str, list[Use]] = {area: [] for area in AREAS}
    for use in used:
        rows[next(area for area, prefixes in AREAS.items() if use.path.startswith(prefixes))].append(use)
    return [(area, found) for area, found in rows.items() if found]


def _short(path: str) -> str:
    return path.removeprefix("vllm.")


def _why(use: Use) -> str:
    return "; ".join(sorted(use.why))


def _how(use: Use) -> str:
    ways = ", ".join(sorted(use.ways - {"listed"})) or "relied on"
    files = ", ".join(f"`{file}`" for file in sorted(use.files))
    return f"{ways}: {files}" if files else ways


def main() -> None:
    sources = [installed(), *(Source(Path(name)) for name in sys.argv[1:])]
    used = uses(sources[0])
    paths = [use.path for use in used]
    known = {version: {path: kept[path] for path in paths if path in kept} for version, kept in _kept().items()}
    known |= {source.version(): fingerprints_of(source, used) for source in sources}
    STORED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(used, known), encoding="utf-8")
    print(f"{len(used)} symbols in {', '.join(sorted(known))}: {STORED.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


def _kept() -> Fingerprints:
    return stored() if STORED.is_file() else {}


if __name__ == "__main__":
    main()
