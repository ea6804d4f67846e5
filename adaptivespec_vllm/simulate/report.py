"""The figures of a simulation on the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adaptivespec_vllm.bench.arms import PLAIN, Arm
from adaptivespec_vllm.bench.report import NOTHING, new_table
from adaptivespec_vllm.simulate.figures import Best, Simulated


def report(results: Sequence[Simulated], arms: Sequence[Arm]) -> RenderableType:
    """A block for each batch size."""
    blocks: list[RenderableType] = []
    for result in results:
        blocks += [Text(f"batch {result.batch}", style="bold cyan"), speeds(result)]
        if result.best_tree:
            blocks += [Text(), *_best_lines(result), relatives(result, arms)]
        blocks.append(Text())
    return Group(*blocks, *(Text(note, style="dim") for note in _notes(results)))


def speeds(result: Simulated) -> Table:
    """One row an arm: how fast, and why."""
    *single, last = next(iter(result.arms.values()))
    table = new_table("arm")
    for heading in ("tokens\n/s", "vs\nplain", *single, "accepted\nlength", "depth/width/\nnodes a step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm, figures in result.arms.items():
        own = figures[last]
        table.add_row(
            arm,
            f"{own.tokens_per_second:.1f}",
            f"{own.vs_plain:.3f}x",
            *(f"{figures[kind].vs_plain:.3f}x" for kind in single),
            f"{own.accepted_length:.2f}",
            NOTHING if arm == PLAIN else f"{own.depth:.1f}/{own.width:.1f}/{own.nodes:.1f}",
        )
    return table


def relatives(result: Simulated, arms: Sequence[Arm]) -> Table:
    """One row an arm of ours: tokens/s over those of the best chain and the best static tree of each kind."""
    table = new_table("times as fast as the best")
    for kind in result.best_tree:
        for role in ("chain", "tree"):
            table.add_column(f"{kind}\n{role}", justify="right", no_wrap=True)
    table.add_column("each text's\nown tree", justify="right", no_wrap=True)
    for arm in (arm.name for arm in arms if arm.family in ("static", "policy")):
        figures = result.arms[arm]
        cells = [
            f"{figures[kind].vs_plain / best[kind].vs_plain:.3f}x"
            for kind in result.best_tree
            for best in (result.best_chain, result.best_tree)
        ]
        *_, last = result.best_tree
        table.add_row(arm, *cells, f"{figures[last].vs_plain / result.best_of_each[last]:.3f}x")
    return table


def _best_lines(result: Simulated) -> Iterator[Text]:
    for kind, tree in result.best_tree.items():
        yield Text(f"{kind}: best chain {_shown(result.best_chain[kind])}, best static tree {_shown(tree)}")


def _shown(best: Best) -> str:
    depth, width, nodes = best.shape
    name = f"of {depth}" if width == 1 else f"{depth},{width},{nodes}"
    return f"{name} ({best.vs_plain:.3f}x plain)"


def _notes(results: Sequence[Simulated]) -> Iterator[str]:
    yield (
        "Time is that of the cost table, not of this machine. accepted length: tokens a step of a request, the "
        "target's own included; depth, width, nodes: of the draft tree of a step, the root not counted. A chain costs "
        "what a static tree of width 1 does."
    )
    if any(result.best_tree for result in results):
        yield (
            "The best are chosen in hindsight out of all static shapes on these very texts, which flatters them, not "
            "ours. each text's own tree: every text (of larger batches: every kind) with the shape that is best for it."
        )
    lost = {
        arm: sum(one.arms[arm][kind].unrecorded for one in results for kind in list(one.arms[arm])[-1:])
        for arm in results[0].arms
    }
    if any(lost.values()):
        names = ", ".join(f"{count} of {arm}" for arm, count in lost.items() if count)
        yield f"Expanded nodes that were not recorded, and so drafted in vain: {names}."
