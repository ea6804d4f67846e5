"""The page: figures in words, tables, pictures and marked text, put into one HTML file."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from adaptivespec_vllm.bench import plots as bench_plots
from adaptivespec_vllm.bench import result as bench
from adaptivespec_vllm.bench.arms import PLAIN
from adaptivespec_vllm.eval import result as evaluation
from adaptivespec_vllm.report import plots
from adaptivespec_vllm.report.inputs import Results, machine, target
from adaptivespec_vllm.report.points import measured, points, smallest, tokens_a_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "report.html"
_TEMPLATE = "page.html.j2"
_DPI = 130


@dataclass(frozen=True)
class Picture:
    """A picture with what it says; ``alt`` for those who cannot see it."""

    name: str
    png: bytes
    alt: str

    @property
    def source(self) -> str:
        """As an address that holds it."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


@dataclass
class Section:
    """A heading, a paragraph that says how to read it, pictures; which table or texts follow is the template's."""

    title: str
    text: str
    pictures: list[Picture] = field(default_factory=list)
    rows: list[evaluation.Figures] = field(default_factory=list)
    traces: list[bench.Trace] = field(default_factory=list)


def write(results: Results, directory: Path) -> list[Path]:
    """Write the page and its pictures; returns their paths, the page first."""
    sections = list(_sections(results))
    paths = [directory / NAME]
    paths[0].write_text(_rendered(results, sections), encoding="utf-8")
    for picture in (picture for section in sections for picture in section.pictures):
        paths.append(directory / f"{picture.name}.png")
        paths[-1].write_bytes(picture.png)
    return paths


def _rendered(results: Results, sections: list[Section]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("adaptivespec_vllm.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    first = results.all[0]
    return environment.get_template(_TEMPLATE).render(
        target=target(first).partition(" ")[0],
        head=str(first.settings.get("head") or "").partition(" ")[0],
        machine=machine(first),
        points=list(in_short(results)),
        warnings=[warning for result in results.all for warning in result.warnings],
        sections=sections,
        origins=[_origin(result) for result in results.all],
        plain=PLAIN,
    )


def _origin(result: bench.Result | evaluation.Result) -> dict[str, str]:
    told = result.provenance
    return {
        "kind": "bench" if isinstance(result, bench.Result) else "eval",
        "time": str(told.get("time", "unknown")),
        "commit": str(told.get("commit") or "unknown"),
        "versions": ", ".join(f"{name} {version}" for name, version in told.get("versions", {}).items()),
        "command": shlex.join(map(str, told.get("command", []))),
        "state": "" if result.complete else "stopped before its end",
    }


def in_short(results: Results) -> Iterator[str]:
    """What a reader in a hurry should know, a sentence each."""
    for result in results.benches:
        rows = [r for r in result.figures if r.place == smallest(result) and r.kind == result.kinds()[-1] and r.ratio]
        lossless = {arm.name for arm in result.arms if arm.lossless and arm.name != PLAIN}
        for told, own in (
            ("the same text as", [row for row in rows if row.arm in lossless]),
            ("another text than", [row for row in rows if row.arm not in lossless and row.arm != PLAIN]),
        ):
            if own:
                top = max(own, key=lambda row: row.ratio.median if row.ratio else 0.0)
                assert top.ratio is not None
                yield (
                    f"Fastest with {told} plain decoding: {top.arm}, {top.ratio.median:.2f} times its speed "
                    f"(95 % interval {top.ratio.low:.2f} to {top.ratio.high:.2f}, {smallest(result).title()})."
                )
    for evaluated in results.evals:
        for row in evaluated.figures:
            pair = row.paired
            if pair is not None and pair.p < 0.05:
                change = "loses" if pair.lost > pair.gained else "gains"
                yield (
                    f"{row.arm} {change} accuracy on {row.task}: {pair.lost} of {row.n} questions lost, {pair.gained} "
                    f"gained (p = {pair.p:.3g})."
                )
        quiet = [row for row in evaluated.figures if row.paired is not None and row.paired.p >= 0.05]
        if quiet:
            names = ", ".join(row.arm for row in quiet)
            yield f"No change of accuracy could be shown on {quiet[0].task} ({quiet[0].n} questions) for: {names}."


def _sections(results: Results) -> Iterator[Section]:
    yield from _frontiers(results)
    yield from _accuracies(results)
    for result in results.benches:
        yield from _speeds(result)
    for result in results.benches:
        if result.traces:
            yield Section(
                "One text, step by step",
                "Each box is a step of the engine, which emits the drafted tokens that were accepted and one of the "
                "target's own. Marked tokens were promoted: accepted although the target would have chosen another.",
                [_picture(f"shapes{_number(results, result)}", plots.shapes(result.traces), "Trees by step")],
                traces=result.traces,
            )


def _frontiers(results: Results) -> Iterator[Section]:
    speeds = measured(results.benches)
    for number, result in enumerate(results.evals):
        arms = result.settings.get("arms", {})
        for task in dict.fromkeys(row.task for row in result.figures):
            rows = [row for row in result.figures if row.task == task]
            pictures = []
            for name, axis, own in (
                ("steps", "tokens a step", tokens_a_step(rows)),
                ("speed", "measured tokens/s over plain decoding", speeds),
            ):
                found = points(rows, arms, own)
                if any(point.lost > 0 for point in found):
                    figure = plots.frontier(found, axis)
                    pictures.append(_picture(f"frontier-{task}-{name}-{number}", figure, f"{axis} by nats given up"))
            if pictures:
                yield Section(
                    f"Speed against quality: {task}",
                    f"Every mark is a way of decoding the same {rows[0].n} prompts. Upwards is faster; to the right, "
                    "more log-probability is given up: texts are less likely under the target than its own choices. "
                    "On the grey line lie those that no other one beats on both.",
                    pictures,
                )


def _accuracies(results: Results) -> Iterator[Section]:
    for result in results.evals:
        for task in dict.fromkeys(row.task for row in result.figures):
            yield Section(
                f"Answers: {task}",
                "Every way answers the same questions as plain decoding. Lost and gained: questions that only plain "
                "decoding, only this way has right; p: McNemar's exact test of the two; recovery: accuracy over that "
                "of plain decoding, with its 95 % interval. Promoted: tokens that were not the target's first choice.",
                rows=[row for row in result.figures if row.task == task],
            )


def _speeds(result: bench.Result) -> Iterator[Section]:
    place = smallest(result)
    yield Section(
        f"Speed: {place.title()}",
        "Tokens a second over plain decoding in the same turn of the same run.",
        [_picture("ratio", bench_plots.ratio(result, place), "Speed over plain decoding by arm")],
    )
    if any(row.accepted_at_depth for row in result.figures):
        yield Section(
            "How far drafts are accepted",
            "The share of steps in which at least so many drafted tokens were accepted; dashed: lossy rules.",
            [_picture("depth", plots.by_depth(result, place), "Share of steps by accepted tokens")],
        )
    contexts = dict.fromkeys(other.context for other in result.places())
    for context in contexts:
        if len({other.batch for other in result.places() if other.context == context}) > 1:
            yield Section(
                "Throughput by batch size" + ("" if context is None else f", context of {context}"),
                "The more requests are decoded together, the dearer a drafted token is. A cross marks the size from "
                "which on plain decoding is as fast.",
                [_picture(f"batch-{context or 'as-is'}", plots.by_batch(result, context), "Speed by batch size")],
            )
    if any(row.split_ms for row in result.figures):
        yield Section(
            "Where the time of a step goes",
            "Milliseconds of an engine step by part.",
            [_picture("time-split", bench_plots.time_split(result, place), "Milliseconds by part of a step")],
        )


def _number(results: Results, result: bench.Result) -> str:
    return "" if len(results.benches) == 1 else f"-{results.benches.index(result)}"


def _picture(name: str, figure: Figure, alt: str) -> Picture:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=_DPI, bbox_inches="tight", facecolor="white")
    return Picture(name, stream.getvalue(), alt)
