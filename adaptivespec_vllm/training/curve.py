"""The learning curve: agreement of head and target after each epoch, as a file, a table and a picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from rich.table import Table

CURVE = "curve.jsonl"

Line = dict[str, Any]
"""epoch, step, seconds, at_depth (share by depth), chain (tokens in a row), rows (held-out tokens at depth 1)"""


def note(path: Path, line: Line) -> None:
    """Add an epoch."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_curve(path: Path) -> list[Line]:
    """All epochs so far."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(lines: list[Line]) -> Table:
    """A row an epoch."""
    result = Table("epoch", *(f"depth {depth}" for depth in _depths(lines)), "tokens in a row")
    for line in lines:
        result.add_row(str(line["epoch"]), *(f"{share:.3f}" for share in line["at_depth"]), f"{line['chain']:.2f}")
    result.title = f"first choice = the target's, on {lines[-1]['rows']} held-out tokens"
    return result


def picture_available() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(lines: list[Line], path: Path) -> None:
    """A line a depth, over epochs."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 3.8))
    axes = figure.subplots()
    epochs = [line["epoch"] for line in lines]
    for depth in _depths(lines):
        axes.plot(epochs, [line["at_depth"][depth - 1] for line in lines], marker="o", label=f"depth {depth}")
    axes.set_xlabel("epoch")
    axes.set_ylabel("share of held-out tokens")
    axes.set_title("The head's first choice is the target's", fontsize="medium")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=130, bbox_inches="tight", facecolor="white")


def _depths(lines: list[Line]) -> range:
    return range(1, len(lines[0]["at_depth"]) + 1)
