"""Counts of the workers as Prometheus metrics and as a log line an interval, beside vLLM's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import (
    AggregateStatLoggerBase,
    LoggingStatLogger,
    PerEngineStatLoggerAdapter,
    PrometheusStatLogger,
)
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from adaptivespec_vllm.engine.metrics.carry import taken_out
from adaptivespec_vllm.engine.metrics.catalogue import LABELS, METRICS, OVERHEAD, Metric
from adaptivespec_vllm.engine.v1.stats import WorkerStats

logger = init_logger("vllm.adaptivespec")  # below vLLM's own, so that it is shown


class TreeStatLogger(AggregateStatLoggerBase):
    """Records what the workers counted; one for all engines of a front end.

    Args:
        vllm_config: its speculative configuration is ours.
        engine_indexes: engines of this front end.
        prometheus: vLLM's Prometheus logger, whose kinds of metrics are used (Ray has its own).
        logs: whether an interval is a line in the log, as it is for vLLM's own.

    """

    def __init__(
        self, vllm_config: VllmConfig, engine_indexes: list[int], prometheus: PrometheusStatLogger, logs: bool
    ) -> None:
        self._prometheus = {
            metric.name: _Series(metric, prometheus, prometheus.per_engine_labelvalues) for metric in METRICS
        }
        self._interval = {index: WorkerStats() for index in engine_indexes} if logs else {}

    @classmethod
    def beside(cls, loggers: Sequence[Any], vllm_config: VllmConfig) -> TreeStatLogger:
        """The one that goes with vLLM's loggers of a front end."""
        prometheus = next(one for one in loggers if isinstance(one, PrometheusStatLogger))
        logs = any(isinstance(one, LoggingStatLogger) for one in _single(loggers))
        return cls(vllm_config, prometheus.engine_indexes, prometheus, logs)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take a step's counts out of vLLM's message."""
        counted = taken_out(scheduler_stats)
        if counted is None:
            return
        for metric in METRICS:
            self._prometheus[metric.name].add(metric.read(counted), engine_idx)
        if engine_idx in self._interval:
            self._interval[engine_idx].add(counted)

    def log(self) -> None:
        """A line for each engine that emitted tokens since the last call."""
        for index, stats in self._interval.items():
            if stats.steps:
                logger.info("%s", line(stats))
            self._interval[index] = WorkerStats()

    def log_engine_initialized(self) -> None:
        """Nothing of ours is known before the first step."""


class _Series:
    """The time series of one metric: by engine, and by the values of its label."""

    def __init__(self, metric: Metric, prometheus: Any, labelvalues: dict[int, list[object]]) -> None:
        self._metric = metric
        labels = [*LABELS, metric.label] if metric.label else [*LABELS]
        kind, more = prometheus._counter_cls, {}
        if metric.kind == "histogram":
            kind, more = prometheus._histogram_cls, {"buckets": metric.buckets}
        family = kind(name=metric.full_name, documentation=metric.meaning, labelnames=labels, **more)
        self._children = {
            (engine, value): family.labels(*own, *([value] if value else []))
            for engine, own in labelvalues.items()
            for value in metric.values or ("",)
        }

    def add(self, read: Any, engine: int) -> None:
        """What :attr:`Metric.read` gave for a step."""
        if self._metric.kind == "histogram":
            observe = self._children[engine, ""].observe
            for value, times in read.items():
                for _ in range(times):
                    observe(value)
        elif self._metric.label:
            for value, number in read.items():
                self._children[engine, value].inc(number)
        else:
            self._children[engine, ""].inc(read)


def line(stats: WorkerStats) -> str:
    """An interval in one line, in the manner of vLLM's own."""
    drafting = stats.nodes.total()
    trees = max(drafting, 1)
    overhead = sum(stats.seconds[section] for section in OVERHEAD.values())
    parts = [
        f"Mean accepted length: {stats.emitted / stats.steps:.2f}",
        f"Mean tree: {stats.drafted_nodes / trees:.1f} nodes, {stats.drafted_depth / trees:.1f} deep, "
        f"{stats.drafted_width / trees:.1f} wide",
        f"Steps without a draft: {100 * (1 - drafting / stats.steps):.1f}%",
        f"Own overhead: {1e3 * overhead / stats.engine_steps:.2f} ms/step",
    ]
    if stats.promotions:
        parts.append(f"Promoted: {stats.promotions} tokens, {stats.regret:.2f} nats given up")
    for name, trips in (("Guard trips", stats.guard_trips.total()), ("Breaker trips", stats.breaker_trips)):
        if trips:
            parts.append(f"{name}: {trips}")
    if stats.chains:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(stats.chains.items()))
        parts.append(f"Chains: {reasons}")
    return "AdaptiveSpec metrics: " + ", ".join(parts)


def _single(loggers: Iterable[Any]) -> Iterable[Any]:
    """vLLM's loggers, those of single engines out of their adapter."""
    for one in loggers:
        if isinstance(one, PerEngineStatLoggerAdapter):
            yield from one.per_engine_stat_loggers.values()
        else:
            yield one
