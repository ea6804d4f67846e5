"""What a run found, as a table and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text
from scipy import stats

from benchmarks.soak.load import Outcome

VERDICTS = ("right", "near-tie", "wrong", "error", "left")
_WARM_UP = 0.25
"""Share of a run that memory may grow in: caches fill, the allocator finds its size."""


def slope(samples: list[tuple[float, float, float, float]], column: int) -> tuple[float, float]:
    """Megabytes a minute after the warm-up, and the standard error of that."""
    after = samples[int(len(samples) * _WARM_UP) :]
    if len(after) < 3:
        return 0.0, 0.0
    fit = stats.linregress([sample[0] / 60 for sample in after], [sample[column] for sample in after])
    return float(fit.slope), float(fit.stderr)


def summary(outcome: Outcome, metrics: dict[str, float], counters: dict[str, Any], log: list[str]) -> dict[str, Any]:
    """Everything worth keeping; ``faults`` is empty after a good run."""
    left_over = {
        name: metrics.get(f"vllm:{name}", 0.0)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    }
    faults = list(outcome.faults) + [f"{name} is {value} after the end" for name, value in left_over.items() if value]
    faults += [f"log: {line[:300]}" for line in log[:5]]
    engine, front = slope(outcome.samples, 1), slope(outcome.samples, 2)
    return {
        "requests": sum(sum(counts.values()) for counts in outcome.verdicts.values()),
        "tokens": outcome.tokens,
        "verdicts": {kind: dict(counts) for kind, counts in sorted(outcome.verdicts.items())},
        "near_ties": outcome.count("near-tie"),
        "wrong": outcome.count("wrong"),
        "errors": outcome.count("error"),
        "left": outcome.count("left"),
        "faults": [fault for fault in faults if ": near-tie: " not in fault],
        "near_tie_gaps": [fault for fault in faults if ": near-tie: " in fault],
        "after": left_over,
        "preemptions": metrics.get("vllm:num_preemptions_total", 0.0),
        "prefix_cache_hits": metrics.get("vllm:prefix_cache_hits_total", 0.0),
        "most_kv_used": max((sample[3] for sample in outcome.samples), default=0.0),
        "accepted_length": counters["emitted"] / counters["steps"] if counters.get("steps") else 1.0,
        "counters": counters,
        "engine_mb": [round(sample[1], 1) for sample in outcome.samples],
        "engine_mb_a_minute": engine,
        "front_end_mb_a_minute": front,
    }


def shown(result: dict[str, Any]) -> Group:
    """The summary for a reader."""
    table = Table("kind", *VERDICTS, title=f"{result['requests']} requests, {result['tokens']} tokens")
    for kind, counts in result["verdicts"].items():
        table.add_row(kind, *(str(counts.get(verdict, "")) for verdict in VERDICTS))
    memory = result["engine_mb"] or [0.0]
    (grows, error), (front, front_error) = result["engine_mb_a_minute"], result["front_end_mb_a_minute"]
    lines = [
        f"preemptions {result['preemptions']:.0f}, prefix cache hits {result['prefix_cache_hits']:.0f} tokens, "
        f"KV cache at most {result['most_kv_used']:.0%} full, accepted length {result['accepted_length']:.2f}",
        f"engine {memory[0]:.0f} -> {memory[-1]:.0f} MB, {grows:+.2f} ± {error:.2f} MB a minute after the warm-up; "
        f"front end {front:+.2f} ± {front_error:.2f}",
        "afterwards " + ", ".join(f"{name} {value:g}" for name, value in result["after"].items()),
        *(f"FAULT {fault}" for fault in result["faults"]),
        *result["near_tie_gaps"],
    ]
    return Group(table, *map(Text, lines))
