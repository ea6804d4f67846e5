"""The block in the log that says what is on with the V2 runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from adaptivespec_vllm import ops
from adaptivespec_vllm.engine import spec_config
from adaptivespec_vllm.engine.front_end import REFUSED_PARAMETERS
from adaptivespec_vllm.engine.v1.startup import log_block, rows_of_settings

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v2.runner import TreeModelRunner


def announce(runner: TreeModelRunner) -> None:
    """Log the block."""
    log_block(runner.settings, _rows(runner))


def _rows(runner: TreeModelRunner) -> Iterator[tuple[str, str]]:
    settings, head = runner.settings, runner.speculator.head
    scheduling = "asynchronous" if runner.scheduler_config.async_scheduling else "synchronous"
    yield "method", f"EAGLE-3 draft trees on the V2 model runner, policy {settings.tree.policy}"
    yield "runner", f"V2: {spec_config.why_runner()}; {scheduling} scheduling"
    yield "head", f"{settings.model}, levels on {'packed weights' if head and head.is_packed else 'its own modules'}"
    yield from rows_of_settings(settings)
    yield "rows", "the target runs over as many draft rows of a request as were worth it a step before"
    yield "eager", "everything: no CUDA graph is captured"
    yield "attention", f"vLLM's CPU kernel; tree rows by {runner.attention_name}"
    yield "ops", ops.describe()["cpu"]
    if runner.policy.costs is not None:
        yield "costs", f"from {settings.tree.costs}" if settings.tree.costs else "measured on this machine"
    yield "trees for", "all requests; chains for those with grammars, penalties, bad words or thinking budgets"
    yield "HTTP 400 for", ", ".join(REFUSED_PARAMETERS)
    if runner.decision_log is not None:
        yield "decisions", f"logged to {runner.decision_log.path}"
    if runner.checks:
        yield "checks", "every step is checked for integrity, which takes time and waits for the device"
