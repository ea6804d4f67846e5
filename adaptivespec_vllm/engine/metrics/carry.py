"""The way of a worker's counts to the front end, and the three places of vLLM that it passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput

from adaptivespec_vllm.engine import seams
from adaptivespec_vllm.engine.v1.stats import WorkerStats

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

KEY = "adaptivespec"
"""Ours among the open fields of vLLM's messages."""


@dataclass
class TreeRunnerOutput(ModelRunnerOutput):
    """What a worker returns of a step, with what it counted in it.

    Attributes:
        counted: ``WorkerStats`` of the step.
        promoted: tokens and nats that promotions of a request came to since it began, for requests that had any.
        planned: nodes that are worth verifying a step later, by request; empty where the scheduler is told with drafts.

    """

    counted: WorkerStats = field(default_factory=WorkerStats)
    promoted: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    planned: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        output: ModelRunnerOutput,
        counted: WorkerStats,
        promoted: Mapping[str, tuple[int, float]],
        planned: Mapping[str, int] | None = None,
    ) -> TreeRunnerOutput:
        return cls(**vars(output), counted=counted, promoted=promoted, planned=planned or {})


@dataclass
class TreeRequestMetrics(RequestSpecDecodeMetrics):
    """vLLM's record of a request, with what a lossy rule did."""

    num_promoted_tokens: int = 0
    logprob_given_up: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As vLLM's, which becomes ``metrics.speculative_decoding`` of the response."""
        return super().to_dict() | {
            "num_promoted_tokens": self.num_promoted_tokens,
            "logprob_given_up": self.logprob_given_up,
        }


def update_from_output(
    original: Callable[..., dict[int, EngineCoreOutputs]], scheduler: Any, scheduler_output: Any, runner_output: Any
) -> dict[int, EngineCoreOutputs]:
    """In the engine core: a step's counts go where its scheduler statistics go, a request's with its last output."""
    messages = original(scheduler, scheduler_output, runner_output)
    if isinstance(runner_output, TreeRunnerOutput):
        _plan_rows(scheduler, runner_output.planned)
        for message in messages.values():
            stats = message.scheduler_stats
            if stats is not None:
                stats.kv_connector_stats = (stats.kv_connector_stats or {}) | {KEY: runner_output.counted.as_dict()}
            for output in message.outputs:
                if output.spec_decode_metrics is not None:
                    promoted = list(runner_output.promoted.get(output.request_id, (0, 0.0)))
                    output.kv_transfer_params = (output.kv_transfer_params or {}) | {KEY: promoted}
    return messages


def _plan_rows(scheduler: Any, planned: Mapping[str, int]) -> None:
    """Asynchronous scheduling takes as many drafts for every request; leave those that are worth it."""
    for request_id, nodes in planned.items():
        request = scheduler.requests.get(request_id)
        if request is not None and len(request.spec_token_ids) > nodes:
            request.spec_token_ids = request.spec_token_ids[:nodes]


def process_outputs(
    original: Callable[..., Any], processor: Any, outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
) -> Any:
    """In the front end: what came with a request's last output joins vLLM's record of it."""
    for output in outputs:
        if output.kv_transfer_params and KEY in output.kv_transfer_params:
            tokens, nats = output.kv_transfer_params.pop(KEY)
            output.kv_transfer_params = output.kv_transfer_params or None
            output.spec_decode_metrics = TreeRequestMetrics(
                **vars(output.spec_decode_metrics), num_promoted_tokens=tokens, logprob_given_up=nats
            )
    return original(processor, outputs, *args, **kwargs)


def taken_out(stats: SchedulerStats | None) -> WorkerStats | None:
    """A step's counts, which are no longer in the message."""
    if stats is None or not stats.kv_connector_stats or KEY not in stats.kv_connector_stats:
        return None
    counted = stats.kv_connector_stats.pop(KEY)
    stats.kv_connector_stats = stats.kv_connector_stats or None
    return WorkerStats.of(counted)


def stat_logger_manager(
    original: Callable[..., None], manager: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """In the front end: our stat logger before all others, where our method is on."""
    original(manager, vllm_config, *args, **kwargs)
    if getattr(vllm_config.speculative_config, "adaptivespec", None) is not None:
        from adaptivespec_vllm.engine.metrics.stat_logger import TreeStatLogger

        manager.stat_loggers.insert(0, TreeStatLogger.beside(manager.stat_loggers, vllm_config))


WRAPS = (
    seams.Wrap(seams.UPDATE_FROM_OUTPUT, update_from_output),
    seams.Wrap(seams.STAT_LOGGER_MANAGER, stat_logger_manager),
    seams.Wrap(seams.PROCESS_OUTPUTS, process_outputs),
)


def install() -> None:
    """Open the way in this process; done wherever a configuration of ours is built or arrives."""
    for wrap in WRAPS:
        wrap.install()
