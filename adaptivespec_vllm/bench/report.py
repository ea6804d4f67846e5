"""The figures on the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adaptivespec_vllm.bench.arms import PLAIN
from adaptivespec_vllm.bench.figures import PARTS
from adaptivespec_vllm.bench.result import ALL_KINDS, Figures, Place, Result, Spread, Standing

NOTHING = "–"
DEEPEST = 8
"""Depths of accepted paths that are shown; the JSON has all."""


def report(result: Result) -> RenderableType:
    """Everything a reader wants to know first: a block for each place, then what to keep in mind."""
    blocks: list[RenderableType] = []
    for place in result.places():
        blocks += [Text(place.title(), style="bold cyan"), speeds(result, place), Text()]
        if any(standing.relatives for standing in result.standings if standing.place == place):
            blocks += [*_best_lines(result, place), relatives(result, place), Text()]
        blocks += [time_split(result, place), Text(), depths(result, place), Text()]
    return Group(*blocks, *(Text(note, style="dim") for note in notes(result)))


def speeds(result: Result, place: Place) -> Table:
    """One row an arm: how fast, and why."""
    kinds = result.kinds()
    single = kinds[:-1] if len(kinds) > 1 else []
    table = new_table("arm")
    for heading in (
        *("tokens\n/s", "vs\nplain", "\nquartiles", *single, "accepted\nlength", "depth/width/\nnodes a step"),
        *("promo-\ntions", "ms\na step", "same\ntext"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in _rows(result, place, kinds[-1]):
        by_kind = [_of_kind(result, row, kind) for kind in single]
        table.add_row(
            row.arm,
            number(row.tokens_per_second, 1),
            middle(row.ratio),
            NOTHING if row.arm == PLAIN else quartiles(row.ratio),
            *map(middle, by_kind),
            number(row.accepted_length, 2),
            NOTHING if row.nodes is None else f"{row.depth:.1f}/{row.width:.1f}/{row.nodes:.1f}",
            NOTHING if row.promotions is None else str(row.promotions),
            number(row.ms_per_step, 1),
            NOTHING if row.arm == PLAIN else f"{row.same_text}/{row.requests}",
        )
    return table


def relatives(result: Result, place: Place) -> Table:
    """One row an arm of ours: tokens/s over those of the best stock chain, the best static tree, its strict twin."""
    standings = [standing for standing in result.standings if standing.place == place]
    table = new_table("times as fast as the best")
    for standing in standings:
        for role in ("stock", "tree"):
            table.add_column(f"{standing.kind}\n{role}", justify="right", no_wrap=True)
    lossy = any(not arm.lossless for arm in result.arms)
    if lossy:
        table.add_column("as without\n@", justify="right", no_wrap=True)
    for arm in (arm.name for arm in result.arms if arm.family in ("static", "policy")):
        cells = [
            _relative(standing, arm, role) for standing in standings for role in ("best stock", "best static tree")
        ]
        table.add_row(arm, *cells, *([_relative(standings[-1], arm, "same without margin")] if lossy else []))
    return table


def time_split(result: Result, place: Place) -> Table:
    """One row an arm: milliseconds of a mean engine step by part."""
    rows = _rows(result, place, result.kinds()[-1])
    parts = [part for part in PARTS if any(part in row.split_ms for row in rows)]
    table = new_table("ms of an engine step")
    for heading in (*parts, "whole step"):
        table.add_column(heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.arm, *(number(row.split_ms.get(part), 2) for part in parts), number(row.ms_per_step, 2))
    return table


def depths(result: Result, place: Place) -> Table:
    """One row an arm that drafts: share of steps whose accepted path reached a depth."""
    rows = [row for row in _rows(result, place, result.kinds()[-1]) if row.accepted_at_depth]
    deepest = min(DEEPEST, max((len(row.accepted_at_depth) for row in rows), default=0))
    table = new_table("accepted at depth")
    for depth in range(1, deepest + 1):
        table.add_column(str(depth), justify="right", no_wrap=True)
    for row in rows:
        shares = [f"{share:.0%}" for share in row.accepted_at_depth[:deepest]]
        table.add_row(row.arm, *shares, *[NOTHING] * (deepest - len(shares)))
    return table


def notes(result: Result) -> Iterator[str]:
    """What a reader of the tables has to know."""
    if not result.complete:
        yield "This run was stopped before its end: figures are those of what was measured."
    several = " Over all kinds, the kinds count by their numbers of prompts." if ALL_KINDS in result.kinds() else ""
    yield (
        "tokens/s: decoding alone, from the moment every request of a batch has its first token. vs plain: in the same "
        "turn; median and quartiles over batches of prompts, each the median of its repeats." + several
    )
    yield (
        "accepted length: tokens a step of a request, the target's own included; depth, width, nodes: of the draft "
        "tree of a step, the root not counted. The best chain and tree are chosen on these very figures, which "
        "flatters them, not ours."
    )
    if any(not arm.lossless for arm in result.arms):
        yield (
            "@: a lossy rule, the margin rule where a number follows: another text than that of plain decoding is "
            "expected. Rules by name are not fused: the time of their steps is no measure of the method."
        )
    if result.settings.get("device") not in (None, "cpu"):
        yield "Parts of a step are times on the host: work that the device still does is part of the rest."
    yield from (f"warning: {warning}" for warning in result.warnings)


def number(value: float | None, digits: int) -> str:
    """A figure in a cell."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def middle(spread: Spread | None) -> str:
    """The median of a ratio in a cell."""
    return NOTHING if spread is None else f"{spread.median:.2f}x"


def quartiles(spread: Spread | None) -> str:
    """First and third quartile in a cell."""
    return NOTHING if spread is None else f"{spread.q1:.2f}–{spread.q3:.2f}"


def new_table(first: str) -> Table:
    """An empty table in our look, with its first column."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    return table


def _rows(result: Result, place: Place, kind: str) -> Sequence[Figures]:
    return [row for row in result.figures if row.place == place and row.kind == kind]


def _of_kind(result: Result, row: Figures, kind: str) -> Spread | None:
    return next((other.ratio for other in _rows(result, row.place, kind) if other.arm == row.arm), None)


def _best_lines(result: Result, place: Place) -> Iterator[Text]:
    for standing in result.standings:
        if standing.place == place:
            named = [("best stock chain", standing.best_stock), ("best static tree", standing.best_static)]
            known = [f"{what} {_with_ratio(result, standing, arm)}" for what, arm in named if arm is not None]
            yield Text(f"{standing.kind}: {', '.join(known) or NOTHING}")


def _with_ratio(result: Result, standing: Standing, arm: str) -> str:
    rows = [row for row in _rows(result, standing.place, standing.kind) if row.arm == arm]
    spread = rows[0].ratio if rows else None
    return f"{arm} ({middle(spread)} plain)"


def _relative(standing: Standing, arm: str, role: str) -> str:
    return middle(next((r.ratio for r in standing.relatives if r.arm == arm and r.role == role), None))
