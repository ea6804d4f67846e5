"""Two results beside each other: what changed, how sure that is, and what else was not alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adaptivespec_vllm.bench import figures
from adaptivespec_vllm.bench.arms import PLAIN
from adaptivespec_vllm.bench.report import NOTHING, new_table
from adaptivespec_vllm.bench.result import Place, Result, Sample, Spread
from adaptivespec_vllm.bench.statistics import spread, spread_of_change

_UNSAID = "(not said)"


class Delta(BaseModel):
    """Change of one figure of an arm from the first result to the second."""

    arm: str
    place: Place
    kind: str
    figure: str
    before: float
    after: float
    change: Spread
    paired: bool
    """Both decoded the same batches of prompts, and the change is that of each of them."""

    @property
    def sure(self) -> bool:
        """Whether the interval of the change leaves out zero."""
        return self.change.low > 0 or self.change.high < 0


class Comparison(BaseModel):
    """Everything that two results have in common, and what they have not."""

    before: str
    after: str
    warnings: list[str]
    deltas: list[Delta]


def compare(before: Result, after: Result, names: tuple[str, str] = ("a", "b")) -> Comparison:
    """What changed from one result to the other."""
    return Comparison(
        before=names[0],
        after=names[1],
        warnings=[*unlike(before, after), *_missing(before, after, names)],
        deltas=list(_deltas(before, after)),
    )


def unlike(before: Result, after: Result) -> Iterator[str]:
    """Conditions that differ, a line each: a change may come from any of them."""
    a, b = _conditions(before), _conditions(after)
    for name in dict.fromkeys([*a, *b]):
        if a.get(name, _UNSAID) != b.get(name, _UNSAID):
            yield f"{name}: {_text(a.get(name, _UNSAID))} and {_text(b.get(name, _UNSAID))}"
    for letter, result in (("first", before), ("second", after)):
        if not result.complete:
            yield f"the {letter} run was stopped before its end"
        yield from (f"the {letter} run: {warning}" for warning in result.warnings)


def _conditions(result: Result) -> dict[str, Any]:
    """What should be alike. The time, the commit, the command and the load differ between any two runs."""
    machine = {k: v for k, v in result.provenance.get("machine", {}).items() if k != "load_average"}
    return _flat("machine", machine) | _flat("version", result.provenance.get("versions", {})) | result.settings


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix} {name}": value for name, value in values.items()}


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _missing(before: Result, after: Result, names: tuple[str, str]) -> Iterator[str]:
    """What was decoded on one side only: whole places and kinds first, then arms where both have the place."""
    a, b = _cells(before), _cells(after)
    for have, other, name in ((a, b, names[1]), (b, a, names[0])):
        where = {(place, kind) for _, place, kind in other}
        whole = [f"{kind}, {place.title()}" for _, place, kind in have if (place, kind) not in where]
        arms = [arm for arm, place, kind in have if (place, kind) in where and (arm, place, kind) not in other]
        if whole:
            yield f"not in {name}: {'; '.join(dict.fromkeys(whole))}"
        if arms:
            yield f"not in {name}: arms {', '.join(dict.fromkeys(arms))}"


def _cells(result: Result) -> dict[tuple[str, Place, str], None]:
    return {
        (arm.name, place, kind): None
        for place in result.places()
        for kind in result.kinds()
        for arm in result.arms
        if figures.of(result, arm.name, place, kind)
    }


def _deltas(before: Result, after: Result) -> Iterator[Delta]:
    others = _cells(after)
    for arm, place, kind in _cells(before):
        if (arm, place, kind) not in others:
            continue
        for figure, values in _FIGURES.items():
            a, b = values(before, arm, place, kind), values(after, arm, place, kind)
            same = _groups(before, place, kind) == _groups(after, place, kind) and a.keys() == b.keys()
            # Of the same prompts, what they have in common cancels out.
            change = (
                spread([b[group] - a[group] for group in a])
                if same
                else spread_of_change(list(a.values()), list(b.values()))
            )
            middle = spread(list(a.values())), spread(list(b.values()))
            if change is not None and middle[0] is not None and middle[1] is not None:
                yield Delta(
                    arm=arm,
                    place=place,
                    kind=kind,
                    figure=figure,
                    before=middle[0].median,
                    after=middle[1].median,
                    change=change,
                    paired=same,
                )


def _groups(result: Result, place: Place, kind: str) -> dict[int, list[str]]:
    return {s.group: s.prompts for s in figures.of(result, PLAIN, place, kind)}


def _ratio(result: Result, arm: str, place: Place, kind: str) -> figures.Values:
    return figures.ratios(figures.of(result, arm, place, kind), figures.of(result, PLAIN, place, kind))


def _metric(metric: figures.Metric) -> Callable[[Result, str, Place, str], figures.Values]:
    def values(result: Result, arm: str, place: Place, kind: str) -> figures.Values:
        samples: list[Sample] = figures.of(result, arm, place, kind)
        return figures.by_group(samples, metric)

    return values


RATIO, LENGTH, STEP = "ratio to plain", "accepted length", "ms a step"
_FIGURES = {RATIO: _ratio, LENGTH: _metric(figures.accepted_length), STEP: _metric(figures.ms_per_step)}


def shown(comparison: Comparison) -> RenderableType:
    """For the screen: a table for each place and kind, warnings before them."""
    blocks: list[RenderableType] = [Text(f"{comparison.before} → {comparison.after}", style="bold")]
    blocks += [Text(f"warning: {warning}", style="yellow") for warning in comparison.warnings]
    for place, kind in dict.fromkeys((delta.place, delta.kind) for delta in comparison.deltas):
        blocks += [Text(f"\n{place.title()}, {kind}", style="bold cyan"), _changes(comparison, place, kind)]
    blocks.append(
        Text(
            "\nEach figure: median over batches of prompts before → after, and the change with its 95 % bootstrap "
            "interval; bold where that leaves out zero.",
            style="dim",
        )
    )
    return Group(*blocks)


def _changes(comparison: Comparison, place: Place, kind: str) -> Table:
    table = new_table("arm")
    for figure in _FIGURES:
        table.add_column(figure, no_wrap=True)
    own = [delta for delta in comparison.deltas if (delta.place, delta.kind) == (place, kind)]
    for arm in dict.fromkeys(delta.arm for delta in own):
        found = {delta.figure: delta for delta in own if delta.arm == arm}
        table.add_row(arm, *(_cell(found[figure]) if figure in found else Text(NOTHING) for figure in _FIGURES))
    return table


def _cell(delta: Delta) -> Text:
    change = delta.change
    text = f"{delta.before:.2f} → {delta.after:.2f}\n{change.median:+.2f} ({change.low:+.2f} to {change.high:+.2f})"
    return Text(text, style="bold" if delta.sure else "")
