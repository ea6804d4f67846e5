"""The figures on the screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adaptivespec_vllm.bench.arms import PLAIN
from adaptivespec_vllm.bench.report import NOTHING, new_table, number
from adaptivespec_vllm.eval.result import Figures, Result


def report(result: Result) -> RenderableType:
    """A block for each task: accuracy where something says what is right, then fidelity and cost."""
    blocks: list[RenderableType] = []
    for task in dict.fromkeys(row.task for row in result.figures):
        rows = [row for row in result.figures if row.task == task]
        blocks += [Text(f"{task}, {max(row.n for row in rows)} prompts", style="bold cyan")]
        if any(row.accuracy is not None for row in rows):
            blocks += [accuracy(rows), Text()]
        blocks += [fidelities(rows), Text()]
    return Group(*blocks, *(Text(note, style="dim") for note in notes(result)))


def accuracy(rows: list[Figures]) -> Table:
    """One row an arm: how many are right, against plain decoding question by question."""
    table = new_table("arm")
    for heading in ("n", "right", "lost", "gained", "p", "recovery", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        pair = row.paired
        interval = pair.recovery if pair is not None else None
        table.add_row(
            row.arm,
            str(row.n),
            _percent(row.accuracy),
            *([NOTHING] * 3 if pair is None else [str(pair.lost), str(pair.gained), f"{pair.p:.3f}"]),
            NOTHING if interval is None else f"{interval[0]:.3f}",
            NOTHING if interval is None else f"{interval[1]:.3f}–{interval[2]:.3f}",
        )
    return table


def fidelities(rows: list[Figures]) -> Table:
    """One row an arm: how far its texts are from those of plain decoding, and what they cost."""
    table = new_table("arm")
    for heading in (
        *("n", "same\ntext", "first\ndifference", "promoted\ntokens", "nats lost\na token", "repeated\nruns"),
        *("cut at\nthe end", "length", "tokens", "tokens\na step", "seconds"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        own = row.fidelity
        table.add_row(
            row.arm,
            str(row.n),
            NOTHING if row.arm == PLAIN else _percent(own.same),
            NOTHING if own.divergence is None else f"{own.divergence:.0f}",
            _percent(own.promoted),
            number(own.lost, 4),
            _percent(own.repetition),
            _percent(own.unfinished),
            f"{own.length:.2f}x",
            str(row.tokens),
            number(row.accepted_length, 2),
            number(row.seconds, 1),
        )
    return table


def notes(result: Result) -> Iterator[str]:
    """What a reader of the tables has to know."""
    if not result.complete:
        yield "This run was stopped before its end: give the same --output again and it goes on."
    if any(row.paired is not None for row in result.figures):
        yield (
            "lost, gained: questions that only plain decoding, only the arm has right; p: McNemar's exact test of the "
            "two; recovery: accuracy over that of plain decoding, its interval by bootstrap over questions."
        )
    yield (
        "first difference: median place of the first token that is not that of plain decoding; promoted tokens: those "
        "that were not the target's first choice; nats lost: log-probability that they gave up, over all tokens; "
        "repeated runs: of four tokens. Seconds include log-probabilities of every token: compare them with each "
        "other alone."
    )
    yield from (f"warning: {warning}" for warning in result.warnings)


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f} %"
