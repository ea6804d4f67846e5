"""The figures as pictures; needs matplotlib (the extra ``bench``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptivespec_vllm.bench.arms import PLAIN
from adaptivespec_vllm.bench.figures import PARTS
from adaptivespec_vllm.bench.result import ALL_KINDS, ArmInfo, Figures, Place, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "no plots: matplotlib is not installed (pip install 'adaptivespec-vllm[bench]')"

_KIND_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2")
_ALL_COLOUR = "#222222"
_PART_COLOURS = ("#3b6fb6", "#7fb2e5", "#e08e45", "#f2c14e", "#d9a066", "#6aa84f", "#b6d7a8", "#bdbdbd")
_FAMILY_COLOURS = {"plain": "#222222", "stock": "#d95f02", "static": "#1f78b4", "policy": "#1b9e77"}
_MARKS = "osv^D<>PhX*p"
_SPEEDS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


def available() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(result: Result, directory: Path) -> list[Path]:
    """Write every picture; returns their paths."""
    paths = []
    for name, figure in _pictures(result):
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=130, bbox_inches="tight", facecolor="white")
        paths.append(path)
    return paths


def _pictures(result: Result) -> Iterator[tuple[str, Figure]]:
    places = result.places()
    for place in places:
        suffix = f"-{_slug(place)}" if len(places) > 1 else ""
        yield f"ratio{suffix}", ratio(result, place)
        yield f"time-split{suffix}", time_split(result, place)
        yield f"accepted-and-cost{suffix}", accepted_and_cost(result, place)
    for axis in ("batch", "context"):
        if len({getattr(place, axis) for place in places}) > 1:
            yield f"ratio-by-{axis}", ratio_by(result, axis)


def ratio(result: Result, place: Place) -> Figure:
    """Tokens/s over plain decoding, a row an arm and a mark a kind: median, quartiles, interval of the median."""
    arms = [arm for arm in result.arms if arm.name != PLAIN]
    kinds = result.kinds()
    figure, (axes,) = _figure(1, 8.5, 1.5 + 0.11 * len(arms) * (len(kinds) + 1))
    for row, arm in enumerate(arms):
        for number, kind in enumerate(kinds):
            spread = next((f.ratio for f in _rows(result, place, kind) if f.arm == arm.name), None)
            if spread is None:
                continue
            y = row + (number - (len(kinds) - 1) / 2) * 0.8 / len(kinds)
            colour, first = _kind_colour(kinds, kind), row == 0
            axes.plot([spread.low, spread.high], [y, y], color=colour, lw=1, alpha=0.6)
            axes.plot([spread.q1, spread.q3], [y, y], color=colour, lw=3, alpha=0.45, solid_capstyle="butt")
            axes.plot(spread.median, y, "o", color=colour, ms=4.5, label=kind if first else None)
    for row in range(len(arms) - 1):
        axes.axhline(row + 0.5, color="#eeeeee", lw=0.8, zorder=0)
    axes.axvline(1, color=_ALL_COLOUR, lw=1, ls="--")
    axes.set_yticks(range(len(arms)), [arm.name for arm in arms])
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xlabel(
        "tokens/s over plain decoding (dot: median, bar: quartiles, line: 95 % interval of the median)", fontsize=9
    )
    axes.legend(frameon=False, fontsize=8, ncol=len(kinds), loc="lower left", bbox_to_anchor=(0, 1))
    _title(figure, result, place, "Speed over plain decoding")
    return figure


def time_split(result: Result, place: Place) -> Figure:
    """Milliseconds of an engine step, stacked by part."""
    rows = _rows(result, place, result.kinds()[-1])
    figure, (axes,) = _figure(1, 8.5, 1.6 + 0.34 * len(rows))
    left = [0.0] * len(rows)
    names = [row.arm for row in rows]
    for part, colour in zip(PARTS, _PART_COLOURS, strict=True):
        values = [row.split_ms.get(part, 0.0) for row in rows]
        if any(values):
            axes.barh(names, values, left=left, color=colour, label=part, height=0.72)
            left = [start + value for start, value in zip(left, values, strict=True)]
    for y, end in enumerate(left):
        axes.text(end, y, f" {end:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08 * max(left, default=1))
    axes.set_xlabel("milliseconds of an engine step", fontsize=9)
    axes.legend(frameon=False, fontsize=8, ncol=4, loc="lower left", bbox_to_anchor=(0, 1))
    _title(figure, result, place, "Where the time of a step goes")
    return figure


def accepted_and_cost(result: Result, place: Place) -> Figure:
    """Accepted length over the cost of a step, a panel a kind; along a grey line the speed is the same."""
    kinds = [kind for kind in result.kinds() if _plain_ms(result, place, kind)]
    columns = min(2, max(1, len(kinds)))
    lines = -(-len(kinds) // columns)
    figure, panels = _figure(columns, 4.4 * columns + 1.8, 3.9 * lines + 0.6, lines, share=True)
    points = {kind: _points(result, place, kind) for kind in kinds}
    every = [point for own in points.values() for _, *point in own] or [[1.0, 1.0]]
    right, top = (max(1.2, 1.06 * max(column)) for column in zip(*every, strict=True))
    left = min(0.9, 0.97 * min(x for x, _ in every))  # on a busy machine a step may seem cheaper than plain decoding's
    styles = _styles(result)
    for axes, kind in zip(panels, kinds, strict=False):
        axes.set(xlim=(left, right), ylim=(0.9, top))
        axes.set_title(kind, fontsize=10)
        _same_speed(axes, right, top)
        for arm, x, y in points[kind]:
            axes.plot(x, y, ls="", **styles[arm])
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    figure.supxlabel("time of a step / that of plain decoding", fontsize=9)
    figure.supylabel("accepted length (tokens a step)", fontsize=9)
    _arm_legend(figure, result, styles)
    _title(figure, result, place, "What a step yields and what it costs")
    return figure


def _plain_ms(result: Result, place: Place, kind: str) -> float | None:
    return next((row.ms_per_step for row in _rows(result, place, kind) if row.arm == PLAIN), None)


def _points(result: Result, place: Place, kind: str) -> list[tuple[str, float, float]]:
    """Of each arm the time of a step, plain decoding being 1, and the accepted length."""
    plain = _plain_ms(result, place, kind)
    return [
        (row.arm, row.ms_per_step / plain, row.accepted_length)
        for row in _rows(result, place, kind)
        if plain and row.ms_per_step and row.accepted_length
    ]


def _same_speed(axes: Axes, right: float, top: float) -> None:
    """Lines through the origin: tokens a step over the time of a step is the speed."""
    for speed in _SPEEDS:
        x = min(right, top / speed)
        if x > 1 and speed * x > 1:
            axes.plot([0, right], [0, speed * right], color="#bbbbbb", lw=0.8, ls="-" if speed == 1 else ":", zorder=0)
            axes.text(x, speed * x, f"{speed:g}x", color="#888888", fontsize=7, ha="right", va="top", clip_on=True)


def _styles(result: Result) -> dict[str, dict[str, Any]]:
    """Colours tell families; marks tell arms of one; a mark is hollow with the margin rule, else that of its twin."""
    marks: dict[str, str] = {}
    used: dict[str, int] = {}
    styles = {}
    for arm in result.arms:
        base = arm.name if arm.lossless else arm.name.rpartition("@")[0] or arm.name
        if base not in marks:
            marks[base] = _MARKS[used.get(arm.family, 0) % len(_MARKS)]
            used[arm.family] = used.get(arm.family, 0) + 1
        colour = _FAMILY_COLOURS[arm.family]
        face = colour if arm.lossless else "white"
        styles[arm.name] = {"marker": marks[base], "color": colour, "mfc": face, "mec": colour, "ms": 6}
    return styles


def _arm_legend(figure: Figure, result: Result, styles: dict[str, dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], ls="", label=arm.name, **styles[arm.name]) for arm in result.arms]
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside right center")


def ratio_by(result: Result, axis: str) -> Figure:
    """Tokens/s over plain decoding, of all kinds together, along batch sizes or lengths of context."""
    kind = result.kinds()[-1]
    other = "context" if axis == "batch" else "batch"
    levels = list(dict.fromkeys(getattr(place, other) for place in result.places()))
    steps = sorted({getattr(place, axis) or 0 for place in result.places()})
    figure, panels = _figure(len(levels), 5.2 * len(levels) + 2, 4.4)
    styles = _styles(result)
    for axes, level in zip(panels, levels, strict=True):
        for arm in result.arms:
            found = {
                getattr(row.place, axis) or 0: row.ratio.median
                for row in result.figures
                if row.arm == arm.name and row.kind == kind and getattr(row.place, other) == level and row.ratio
            }
            xs = sorted(found)
            line = "-" if arm.lossless else "--"
            axes.plot([steps.index(x) for x in xs], [found[x] for x in xs], line, lw=1.1, **styles[arm.name])
        axes.set_xticks(range(len(steps)), ["as is" if axis == "context" and not step else str(step) for step in steps])
        axes.set(xlabel="requests in a batch" if axis == "batch" else "tokens of context")
        if len(levels) > 1:
            axes.set_title(f"{other} {level if level is not None else 'as is'}")
    panels[0].set_ylabel("tokens/s over plain decoding, median")
    _arm_legend(figure, result, styles)
    figure.suptitle(f"Speed over plain decoding by {axis}\n{_subtitle(result)}", fontsize=10)
    return figure


def _figure(
    panels: int, width: float, height: float, lines: int = 1, *, share: bool = False
) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(lines, panels, squeeze=False, sharex=share, sharey=share).flat)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=8)
    return figure, axes


def _title(figure: Figure, result: Result, place: Place, title: str) -> None:
    figure.suptitle(f"{title}: {place.title()}\n{_subtitle(result)}", fontsize=10)


def _subtitle(result: Result) -> str:
    settings = result.settings
    model = str(settings.get("model", "")).split(" ")[0].rsplit("/", 1)[-1]
    told = [model, settings.get("dtype"), settings.get("mode"), _hardware(result)]
    warned = ["BUSY MACHINE"] if any("busy" in warning for warning in result.warnings) else []
    return ", ".join(str(part) for part in [*told, *warned] if part)


def _hardware(result: Result) -> str:
    machine = result.provenance.get("machine", {})
    if machine.get("gpu"):
        return str(machine["gpu"])
    threads = result.settings.get("threads")
    counted = f"{threads} thread{'s' if threads != 1 else ''}" if threads else ""
    return ", ".join(part for part in (str(machine.get("cpu", "")), counted) if part)


def _rows(result: Result, place: Place, kind: str) -> list[Figures]:
    return [row for row in result.figures if row.place == place and row.kind == kind]


def _arm(result: Result, name: str) -> ArmInfo:
    return next(arm for arm in result.arms if arm.name == name)


def _kind_colour(kinds: Sequence[str], kind: str) -> str:
    return _ALL_COLOUR if kind == ALL_KINDS else _KIND_COLOURS[kinds.index(kind) % len(_KIND_COLOURS)]


def _slug(place: Place) -> str:
    return f"batch{place.batch}" + (f"-context{place.context}" if place.context is not None else "")
