"""How the choice follows the costs, as a picture; needs matplotlib (the extra ``bench``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from adaptivespec_vllm.simulate.figures import Choice

NAME = "choice-by-cost.png"
_ONE = "cost as in the table"


def draw(panels: Mapping[str, Sequence[Choice]], title: str, directory: Path) -> Path:
    """Write the picture: a column for each thing that gets dearer, with the choice above and the speed below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.0 + 4.6 * len(panels), 6.4), layout="constrained")
    axes = figure.subplots(2, len(panels), squeeze=False, sharex="col")
    for column, (heading, choices) in enumerate(panels.items()):
        chosen, speed = axes[0][column], axes[1][column]
        places = range(len(choices))
        for name, colour in (("nodes", "#1f77b4"), ("width", "#2ca02c"), ("depth", "#ff7f0e")):
            chosen.plot(places, [getattr(choice, name) for choice in choices], "o-", ms=4, color=colour, label=name)
        for name, label, style in (
            ("speed", "this policy", {"color": "#1b9e77", "marker": "o", "ms": 4, "lw": 2}),
            ("best_tree", "best static tree of all shapes", {"color": "#1f78b4", "ls": "--", "lw": 1.2}),
            ("best_chain", "best chain", {"color": "#d95f02", "ls": ":", "lw": 1.5}),
        ):
            speed.plot(places, [getattr(choice, name) for choice in choices], label=label, **style)
        speed.axhline(1, color="#222222", lw=0.8)
        speed.set_xticks(places, [f"{choice.factor:g}" for choice in choices])
        speed.set_xlabel(f"{heading}: times the {_ONE}", fontsize=9)
        chosen.set_title(heading, fontsize=10)
        for one in (chosen, speed):
            one.spines[["top", "right"]].set_visible(False)
            one.tick_params(labelsize=8)
            one.set_ylim(bottom=0)
    axes[0][0].set_ylabel("of the tree of a step, mean", fontsize=9)
    axes[1][0].set_ylabel("tokens/s over plain decoding", fontsize=9)
    axes[0][0].legend(frameon=False, fontsize=8)
    axes[1][0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    path = directory / NAME
    figure.savefig(path, dpi=130, bbox_inches="tight", facecolor="white")
    return path
