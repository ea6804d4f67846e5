"""The metrics in one list, which the stat logger, ``docs/metrics.md`` and the dashboard follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from adaptivespec_vllm.engine.v1.stats import CHAIN_REASONS, WorkerStats

PREFIX = "vllm:adaptivespec_"

LABELS = ("model_name", "engine")
"""Of every metric, as of vLLM's own."""

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)
LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32, 63)

OVERHEAD = {
    "prepare": "execute/prepare",
    "verify": "verify",
    "commit": "commit",
    "learn": "learn",
    "draft_first": "draft/first",
    "draft_levels": "draft/levels",
}
"""Parts of a step that plain decoding does not have, and the sections of the worker that time them."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without the prefix.
        kind: a counter is shown with ``_total``, a histogram with ``_bucket``, ``_sum`` and ``_count``.
        meaning: one sentence; Prometheus shows it as help.
        unit: of its values.
        read: what a step adds: a number; numbers by value of the label; or, of a histogram, how often by value.
        label: a label besides ``LABELS``.
        values: of that label.
        buckets: of a histogram.

    """

    name: str
    kind: Literal["counter", "histogram"]
    meaning: str
    unit: str
    read: Callable[[WorkerStats], Any]
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[int, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def shown(self) -> tuple[str, ...]:
        """Names under which a scrape shows it."""
        suffixes = ("total",) if self.kind == "counter" else ("bucket", "sum", "count")
        return tuple(f"{self.full_name}_{suffix}" for suffix in suffixes)


def _overhead(stats: WorkerStats) -> Mapping[str, float]:
    return {part: stats.seconds[section] for part, section in OVERHEAD.items()}


def _paths(stats: WorkerStats) -> Mapping[str, int]:
    return {"tree": stats.engine_steps - stats.plain_engine_steps, "plain": stats.plain_engine_steps}


METRICS = (
    Metric(
        "accepted_length",
        "histogram",
        "Tokens that a request emitted in a step: accepted draft tokens and the target's own; 1 without a draft.",
        "tokens",
        lambda stats: stats.lengths,
        buckets=LEVELS,
    ),
    Metric(
        "drafted_nodes",
        "histogram",
        "Draft nodes of a request that a step verified; steps of requests without any are not observed.",
        "nodes",
        lambda stats: stats.nodes,
        buckets=NODES,
    ),
    Metric(
        "drafted_depth",
        "histogram",
        "Levels of the trees that were verified.",
        "levels",
        lambda stats: stats.depths,
        buckets=LEVELS,
    ),
    Metric(
        "drafted_width",
        "histogram",
        "Most nodes on one level of the trees that were verified.",
        "nodes",
        lambda stats: stats.widths,
        buckets=NODES,
    ),
    Metric(
        "promotions",
        "counter",
        "Accepted draft tokens that were not the target's own choice (margin or another lossy rule).",
        "tokens",
        lambda stats: stats.promotions,
    ),
    Metric(
        "logprob_given_up_nats",
        "counter",
        "Log-probability that promotions gave up against the target's own choices.",
        "nats",
        lambda stats: stats.regret,
    ),
    Metric(
        "guard_trips",
        "counter",
        "Times that a guard began to keep a request from promotions that the rule alone would allow.",
        "times",
        lambda stats: stats.guard_trips,
        label="guard",
        values=("min_acceptance", "max_regret"),
    ),
    Metric(
        "breaker_trips",
        "counter",
        "Times that a request's circuit breaker opened (policy 'adaptive'; others have none).",
        "times",
        lambda stats: stats.breaker_trips,
    ),
    Metric(
        "chain_fallbacks",
        "counter",
        "Trees that were verified as chains, by reason.",
        "trees",
        lambda stats: stats.chains,
        label="reason",
        values=CHAIN_REASONS,
    ),
    Metric(
        "engine_steps",
        "counter",
        "Steps of the whole batch that emitted tokens: with a draft in it, or a row a request as in plain decoding.",
        "steps",
        _paths,
        label="path",
        values=("tree", "plain"),
    ),
    Metric(
        "overhead_seconds",
        "counter",
        "Time of the worker in parts of a step that plain decoding does not have.",
        "seconds",
        _overhead,
        label="part",
        values=tuple(OVERHEAD),
    ),
)


def markdown_table() -> str:
    """The table of ``docs/metrics.md``."""
    lines = ["| metric | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        name = f"`{metric.shown[0]}`" if metric.kind == "counter" else f"`{metric.full_name}`"
        label = f"`{metric.label}`: {', '.join(metric.values)}" if metric.label else ""
        lines.append(f"| {name} | {metric.kind} | {label} | {metric.unit} | {metric.meaning} |")
    return "\n".join(lines) + "\n"
