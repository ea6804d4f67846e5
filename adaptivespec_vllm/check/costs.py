"""What a step costs, as ``adaptivespec check`` shows it: from a file, from an earlier start, or measured now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaptivespec_vllm import runtime
from adaptivespec_vllm.config import AdaptiveSpecConfig, ConfigError, read, reason
from adaptivespec_vllm.engine import cost_cache
from adaptivespec_vllm.policy.costs import Costs
from adaptivespec_vllm.screen import Steps, quiet

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BATCHES = (1, 8, 32)
_NEARLY_FREE = 1.1
_KV_CACHE_BYTES = 1 << 30
"""Of the engine that measures; the context is made to fit it."""


@dataclass(frozen=True)
class CostsFound:
    """Costs of a step, or why there are none to show.

    Attributes:
        source: where they come from.
        costs: the costs.
        facts: what they depend on, of measured ones.

    """

    source: str
    costs: Costs | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; ``costs`` is what a file for ``tree.costs`` holds."""
        if self.costs is None:
            return {"source": self.source}
        return {
            "source": self.source,
            "facts": dict(self.facts),
            "costs": self.costs.to_dict(),
            "nearly_free_rows": nearly_free_rows(self.costs),
            "tokens_to_pay": {str(batch): tokens_to_pay(self.costs, batch) for batch in _BATCHES},
        }

    def lines(self) -> Iterator[str]:
        """For a reader."""
        yield self.source
        if self.facts:
            yield _in_words(self.facts)
        if self.costs is None:
            return
        most = self.costs.target.points[-1][0]
        sizes = [rows for rows in _ROWS if rows <= most] or [1]
        yield _row("milliseconds, rows", map(str, sizes))
        for name, part in (("target", "target"), ("head, first pass", "first"), ("head, a level", "level")):
            table = getattr(self.costs, part)
            yield _row(f"  {name}", (f"{1000 * table(rows):.2f}" for rows in sizes))
        free, percent = nearly_free_rows(self.costs), round(100 * (_NEARLY_FREE - 1))
        yield f"nearly free: up to {free} rows take the target at most {percent} % longer than 1"
        yield _row("tokens to pay, requests", map(str, _BATCHES))
        prices = [tokens_to_pay(self.costs, batch) for batch in _BATCHES]
        for name in prices[0]:
            yield _row(f"  {name}", (f"{price[name]:.3f}" for price in prices))


def nearly_free_rows(costs: Costs) -> int:
    """The most rows, of those measured, that take the target little longer than one."""
    most = int(costs.target.points[-1][0])
    return max(rows for rows in range(1, most + 1) if costs.target(rows) <= _NEARLY_FREE * costs.target(1))


def tokens_to_pay(costs: Costs, requests: int) -> dict[str, float]:
    """Tokens that a part of drafting has to bring each request of a batch, to be worth its time.

    At the rate of plain decoding; a faster one asks for more.
    """
    plain = costs.overhead + costs.target(requests)
    return {
        "the first pass": costs.first(requests) / plain,
        "a level of one node": costs.level(requests) / plain,
        "a verified node": (costs.target(2 * requests) - costs.target(requests)) / plain,
    }


def given(settings: AdaptiveSpecConfig) -> CostsFound | None:
    """What the configuration alone says of costs; None where they are measured."""
    if settings.tree.policy != "cost-aware":
        return CostsFound(f"policy {settings.tree.policy!r} asks for none")
    if settings.tree.costs is not None:
        return CostsFound(f"of the file {settings.tree.costs}", Costs.read(settings.tree.costs))
    return None


def kept(target: str, head: str) -> CostsFound:
    """Costs of the last start of a target and a head on this machine."""
    found = cost_cache.find(target, head)
    if not found:
        return CostsFound("measured at the first start of this target and head here, or now with --measure")
    last, *others = found
    more = f"; {len(others)} more of other settings or versions" if others else ""
    return CostsFound(f"measured at a start of {last.measured} ({last.path}{more})", last.costs, last.facts)


def measured(source: Path, target: str, head: str) -> CostsFound:
    """Costs measured by an engine that is started for it; those of earlier starts are forgotten.

    Raises:
        ConfigError: the engine did not start.

    """
    from vllm import LLM

    for earlier in cost_cache.find(target, head):
        earlier.path.unlink(missing_ok=True)
    log = runtime.cache_dir() / "check.log"
    with quiet(log, 2) as console, Steps(console).step("starting an engine that measures"):
        try:
            llm = LLM(
                model=target,
                speculative_config=read(source),
                skip_tokenizer_init=True,
                max_model_len=-1,
                kv_cache_memory_bytes=_KV_CACHE_BYTES,
            )
            found = llm.collective_rpc("adaptivespec_costs")[0]
        except Exception as error:  # vLLM and its libraries raise anything
            raise ConfigError(f"--measure: {reason(error)}; see {log}") from error
    costs = Costs.from_dict(found["costs"])
    busy = "" if cost_cache.look_up(found["facts"]) else "; not kept, because other programs were busy"
    return CostsFound(f"measured now{busy}", costs, found["facts"])


def _in_words(facts: Mapping[str, Any]) -> str:
    versions = facts["versions"]
    return (
        f"{facts['dtype']}, {facts['threads']} threads, {facts['ranks']} ranks, levels on "
        f"{'packed weights' if facts['packed levels'] else 'own modules'}, at most {facts['rows']} rows; "
        f"adaptivespec {versions['adaptivespec']}, vllm {versions['vllm']}, torch {versions['torch']}"
    )


def _row(name: str, columns: Iterator[str]) -> str:
    return f"{name:<25}" + "".join(f"{column:>9}" for column in columns)
