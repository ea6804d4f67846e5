"""The pictures of a page; needs matplotlib (the extra ``report``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from adaptivespec_vllm.bench.arms import PLAIN
from adaptivespec_vllm.bench.result import Place, Result, Trace
from adaptivespec_vllm.report.points import PUBLISHED, STRICT, Point, best, crossover, setting_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RULES = {
    STRICT: "#222222",
    "margin": "#1b7f5c",
    PUBLISHED: "#5aa9e6",
    "margin with a guard": "#7cc5a9",
    "mars": "#d95f02",
    "typical": "#7570b3",
    "fly": "#c2185b",
}
_OTHER = "#8c564b"
_MARKS = "osD^vP<>Xh"
_MOST_ARMS = 10


def frontier(found: Sequence[Point], axis: str) -> Figure:
    """Speed over nats lost a token: a colour a rule, a mark a tree; up and to the left is better."""
    figure, axes = _figure(8.6, 5.2)
    drafts = list(dict.fromkeys(point.drafts for point in found))
    for tree, mark in zip(drafts, _MARKS * len(drafts), strict=False):
        for rule in dict.fromkeys(point.rule for point in found):
            own = sorted((p for p in found if (p.rule, p.drafts) == (rule, tree)), key=lambda p: p.lost)
            xs, ys = [point.lost for point in own], [point.speed for point in own]
            axes.plot(xs, ys, "-", marker=mark, color=_RULES.get(rule, _OTHER), lw=1, alpha=0.9, ms=7)
    kept = best(list(found))
    right = max((point.lost for point in found), default=0.0) or 0.01
    axes.step([*(p.lost for p in kept), 1.05 * right], [*(p.speed for p in kept), kept[-1].speed], where="post",
              color="#bbbbbb", lw=6, alpha=0.5, zorder=0)  # fmt: skip
    for point in found:
        told, colour = setting_of(point.arm, point.rule), _RULES.get(point.rule, _OTHER)
        axes.annotate(
            told, (point.lost, point.speed), xytext=(5, -9), textcoords="offset points", fontsize=7, color=colour
        )
    axes.set(xlabel="log-probability given up (nats a token): further right is worse", ylabel=axis)
    axes.set_xlim(-0.03 * right, 1.12 * right)
    _legends(axes, found, drafts)
    return figure


def _legends(axes: Axes, found: Sequence[Point], drafts: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    rules = list(dict.fromkeys(point.rule for point in found))
    handles = [Line2D([], [], color=_RULES.get(rule, _OTHER), marker="o", label=rule) for rule in rules]
    handles += [
        Line2D([], [], color="#888888", marker=mark, ls="", label=tree)
        for tree, mark in zip(drafts, _MARKS * len(drafts), strict=False)
    ]
    handles.append(Line2D([], [], color="#bbbbbb", lw=6, alpha=0.5, label="best of all"))
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def by_depth(result: Result, place: Place) -> Figure:
    """Share of steps whose accepted path reached each depth."""
    figure, axes = _figure(8.6, 4.4)
    rows = [r for r in result.figures if r.place == place and r.kind == result.kinds()[-1] and r.accepted_at_depth]
    deepest = 1
    for number, row in enumerate(rows[:_MOST_ARMS]):
        shares = row.accepted_at_depth
        deepest = max(deepest, len(shares))
        lossless = next(arm.lossless for arm in result.arms if arm.name == row.arm)
        axes.plot(range(len(shares) + 1), [1.0, *shares], "-" if lossless else "--", marker=_MARKS[number % 10], ms=4,
                  lw=1.2, label=f"{row.arm}: {row.accepted_length:.2f} tokens a step")  # fmt: skip
    axes.set_xticks(range(deepest + 1))
    axes.set(ylim=(0, 1.02), xlabel="drafted tokens accepted in a step, at least", ylabel="share of steps")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def by_batch(result: Result, context: int | None) -> Figure:
    """Tokens/s over plain decoding by batch size, with the size from which on plain decoding is as fast."""
    figure, axes = _figure(8.6, 4.6)
    ratios = ratios_by_batch(result, context)
    sizes = sorted({size for own in ratios.values() for size in own})
    for number, (arm, own) in enumerate(list(ratios.items())[:_MOST_ARMS]):
        (line,) = axes.plot(
            [math.log2(size) for size in own], list(own.values()), "-", marker=_MARKS[number % 10], ms=5, lw=1.3
        )
        ends = crossover(own)
        line.set_label(f"{arm}: " + ("faster in all of them" if ends is None else f"faster below {ends:.0f}"))
        if ends is not None and ends > sizes[0]:
            axes.plot(math.log2(ends), 1.0, "x", color=line.get_color(), ms=10, mew=2, zorder=3)
    axes.axhline(1.0, color="#222222", lw=1, ls="--")
    axes.text(math.log2(sizes[0]), 1.0, "plain decoding", fontsize=8, va="bottom")
    axes.set_xticks([math.log2(size) for size in sizes], [str(size) for size in sizes])
    axes.set(xlabel="requests decoded together", ylabel="tokens/s over plain decoding, median")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def ratios_by_batch(result: Result, context: int | None) -> Mapping[str, Mapping[int, float]]:
    """Tokens/s over plain decoding of all kinds, by arm and batch size."""
    found: dict[str, dict[int, float]] = {}
    for row in sorted(result.figures, key=lambda r: r.place.batch):
        if row.arm != PLAIN and row.kind == result.kinds()[-1] and row.place.context == context and row.ratio:
            found.setdefault(row.arm, {})[row.place.batch] = row.ratio.median
    return found


def shapes(traces: Sequence[Trace]) -> Figure:
    """Of each step of one text: nodes that were drafted, and tokens that came of them."""
    figure, _ = _figure(8.6, 0.7 + 1.15 * len(traces), lines=len(traces))
    longest = max(len(trace.steps) for trace in traces)
    for axes, trace in zip(figure.axes, traces, strict=True):
        steps = trace.steps[1:]  # the first reads the prompt
        at = range(1, len(steps) + 1)
        axes.bar(at, [step.nodes for step in steps], color="#9ecae1", width=0.9, label="drafted tokens (nodes)")
        axes.plot(at, [step.depth for step in steps], "_", color="#08519c", ms=5, mew=1.5, label="their depth")
        axes.plot(at, [len(step.tokens) for step in steps], ".", color="#d95f02", ms=5, label="emitted tokens")
        axes.set_xlim(0, longest)
        axes.set_ylabel(trace.arm, fontsize=8, rotation=0, ha="right", va="center")
    figure.axes[-1].set_xlabel("step of the engine", fontsize=9)
    figure.axes[0].legend(frameon=False, fontsize=8, ncol=3, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def _figure(width: float, height: float, lines: int = 1) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(lines, 1, squeeze=False, sharex=True)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure, grid[0][0]
