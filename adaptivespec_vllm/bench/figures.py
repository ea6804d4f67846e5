"""From the turns of a run to its figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from adaptivespec_vllm.bench.arms import PLAIN
from adaptivespec_vllm.bench.result import ALL_KINDS, ArmInfo, Figures, Place, Relative, Result, Sample, Standing
from adaptivespec_vllm.bench.statistics import spread

Turn = tuple[Place, int, int]
"""Place, batch of prompts and repeat: within a turn each arm decodes the same prompts, one arm after the other."""

Values = dict[int, float]
"""One value a batch of prompts: the median of its repeats."""

Metric = Callable[[Sample], float | None]

TARGET, ATTENTION, FIRST, LEVELS, CHAIN, VERIFY, COMMIT, REST = PARTS = (
    "target forward",
    "tree attention",
    "draft first pass",
    "draft levels",
    "draft chain",
    "verify",
    "commit",
    "rest",
)
"""Parts of an engine step. A stock chain is timed as one; the rest is what no stopwatch was held to."""

_ATTENTION_SECTION = "execute/target/attention"
_SECTIONS = {
    TARGET: "execute/target",
    ATTENTION: _ATTENTION_SECTION,
    FIRST: "draft/first",
    LEVELS: "draft/levels",
    CHAIN: "draft/chain",
    VERIFY: "verify",
    COMMIT: "commit",
}


def speed(sample: Sample) -> float | None:
    """Tokens a second."""
    return _divided(sample.emitted, sample.seconds)


def accepted_length(sample: Sample) -> float | None:
    """Tokens a step of a request."""
    return _divided(sample.emitted, sample.steps)


def ms_per_step(sample: Sample) -> float | None:
    """Milliseconds of an engine step."""
    return _divided(1e3 * sample.seconds, sample.engine_steps)


def of(result: Result, arm: str, place: Place, kind: str) -> list[Sample]:
    """The turns of an arm at a place, on one kind of prompts or on all."""
    return [s for s in result.samples if s.arm == arm and s.place == place and kind in (s.kind, ALL_KINDS)]


def by_group(samples: Iterable[Sample], metric: Metric) -> Values:
    """A value for each batch of prompts."""
    return _medians((sample.group, metric(sample)) for sample in samples)


def ratios(samples: Iterable[Sample], others: Iterable[Sample]) -> Values:
    """Tokens/s over another arm's in the same turn, a value for each batch of prompts."""
    beside = {turn(other): speed(other) for other in others}
    return _medians((sample.group, _divided(speed(sample), beside.get(turn(sample)))) for sample in samples)


def turn(sample: Sample) -> Turn:
    """Which turn of the run it belongs to."""
    return sample.place, sample.group, sample.round


def _medians(values: Iterable[tuple[int, float | None]]) -> Values:
    repeats: dict[int, list[float]] = {}
    for group, value in values:
        if value is not None:
            repeats.setdefault(group, []).append(value)
    return {group: statistics.median(own) for group, own in repeats.items()}


def split_ms(samples: Sequence[Sample]) -> dict[str, float]:
    """Milliseconds of the parts of a mean engine step; empty where no step was measured."""
    steps = sum(sample.engine_steps for sample in samples)
    if not steps:
        return {}

    def ms(section: str) -> float:
        return 1e3 * sum(sample.sections.get(section, 0.0) for sample in samples) / steps

    parts = {part: ms(section) for part, section in _SECTIONS.items()}
    parts[TARGET] -= parts[ATTENTION]  # which is a part of it
    whole = 1e3 * sum(sample.seconds for sample in samples) / steps
    parts[REST] = max(0.0, whole - sum(parts.values()))
    return {part: value for part, value in parts.items() if value > 0}


def summarise(result: Result) -> None:
    """Fill in the figures and standings of all that was measured."""
    places, kinds = result.places(), result.kinds()
    result.figures = [
        figures(result, arm, place, kind)
        for place in places
        for kind in kinds
        for arm in result.arms
        if of(result, arm.name, place, kind)
    ]
    result.standings = [standing(result, place, kind) for place in places for kind in kinds]


def figures(result: Result, arm: ArmInfo, place: Place, kind: str) -> Figures:
    """The figures of an arm on a kind of prompts at a place."""
    own, plain = of(result, arm.name, place, kind), of(result, PLAIN, place, kind)
    paired = _paired(own, plain)
    steps = sum(sample.steps for sample in own)
    reached = [sum(column) for column in _columns([sample.reached for sample in own])]
    peaks = [sample.device_peak_bytes for sample in own if sample.device_peak_bytes is not None]
    return Figures(
        arm=arm.name,
        place=place,
        kind=kind,
        tokens_per_second=_total_speed(own),
        ratio=spread(list(ratios(own, plain).values())),
        ratio_of_totals=_divided(_total_speed(paired), _total_speed(_paired(plain, own))),
        ms_per_step=_divided(1e3 * sum(s.seconds for s in own), sum(s.engine_steps for s in own)),
        accepted_length=_divided(sum(sample.emitted for sample in own), steps),
        accepted_at_depth=[count / steps for count in reached] if steps else [],
        **{name: _drafted(arm, own, name) for name in ("nodes", "depth", "width")},
        promotions=None if own[0].promotions is None else sum(sample.promotions or 0 for sample in own),
        same_text=sum(sample.same_text for sample in own),
        requests=sum(len(sample.prompts) for sample in own),
        split_ms=split_ms(own),
        device_peak_bytes=max(peaks, default=None),
    )


def _paired(samples: Sequence[Sample], others: Sequence[Sample]) -> list[Sample]:
    """Those whose turn the others took too: a run that was stopped may lack some."""
    turns = {turn(other) for other in others}
    return [sample for sample in samples if turn(sample) in turns]


def _total_speed(samples: Sequence[Sample]) -> float | None:
    return _divided(sum(sample.emitted for sample in samples), sum(sample.seconds for sample in samples))


def _drafted(arm: ArmInfo, samples: Sequence[Sample], name: str) -> float | None:
    """Mean over steps: what the engine counted, or what a chain always drafts."""
    if arm.chain is not None:
        return 1.0 if name == "width" else float(arm.chain)
    counted = [sample for sample in samples if sample.drafted]
    return _divided(sum(s.drafted[name] for s in counted), sum(s.drafted["steps"] for s in counted))


def _columns(rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    for column in range(max(map(len, rows), default=0)):
        yield [row[column] for row in rows if column < len(row)]


def standing(result: Result, place: Place, kind: str) -> Standing:
    """The best chain and the best lossless static tree, and every arm of ours beside them."""
    own = {arm.name: of(result, arm.name, place, kind) for arm in result.arms}
    best_stock = _best(result, own, [arm for arm in result.arms if arm.family == "stock"])
    best_static = _best(result, own, [arm for arm in result.arms if arm.family == "static" and arm.lossless])
    relatives = []
    for arm in result.arms:
        if arm.family not in ("static", "policy"):
            continue
        twin = _strict_twin(result, arm)
        for role, other in (
            ("best stock", best_stock), ("best static tree", best_static), ("same without margin", twin)
        ):  # fmt: skip
            beside = None if other in (None, arm.name) else spread(list(ratios(own[arm.name], own[other]).values()))
            if beside is not None:
                relatives.append(Relative.model_validate({"arm": arm.name, "to": other, "role": role, "ratio": beside}))
    return Standing(place=place, kind=kind, best_stock=best_stock, best_static=best_static, relatives=relatives)


def _best(result: Result, own: dict[str, list[Sample]], arms: Sequence[ArmInfo]) -> str | None:
    medians = {
        arm.name: found.median
        for arm in arms
        if (found := spread(list(ratios(own[arm.name], own.get(PLAIN, [])).values()))) is not None
    }
    return max(medians, key=medians.__getitem__, default=None)


def _strict_twin(result: Result, arm: ArmInfo) -> str | None:
    base, mark, _ = arm.name.rpartition("@")
    return base if mark and not arm.lossless and any(other.name == base for other in result.arms) else None


def _divided(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
