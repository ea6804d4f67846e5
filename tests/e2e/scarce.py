"""Engines with little of everything, and a way to drive them step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.oracle import runner_of

SCARCE: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 48,
    "enable_chunked_prefill": True,
    "num_gpu_blocks_override": 26,  # three requests of full length
    "scheduling_policy": "priority",
}


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an in-process ``LLM``."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(llm: Any) -> int:
    return scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks()


@dataclass(frozen=True)
class Arrival:
    """A request, and what happens to it.

    Attributes:
        prompt: token ids.
        params: sampling parameters.
        at: step of its arrival.
        priority: smaller is more urgent.
        abort_at: step at which it is aborted, if it still lives.

    """

    prompt: Sequence[int]
    params: Any
    at: int = 0
    priority: int = 0
    abort_at: int | None = None


@dataclass
class Run:
    """What became of the requests, by their number: tokens of the finished ones; how often one was preempted."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)


def drive(
    llm: Any, arrivals: Sequence[Arrival], watch: Callable[[int, Any], Mapping[int, None] | None] | None = None
) -> Run:
    """Step the engine until every request has ended.

    Args:
        llm: an in-process engine.
        arrivals: requests, numbered by their place.
        watch: called after each step with its number and the runner; returns requests to abort.

    """
    engine, scheduler, run = llm.llm_engine, scheduler_of(llm), Run()
    stock = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        run.preempted.append(request.request_id)
        return stock(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    try:
        step, last = 0, max(arrival.at for arrival in arrivals)
        while step <= last or engine.has_unfinished_requests():
            assert step < 20_000, "the requests do not end"
            for number, arrival in enumerate(arrivals):
                if arrival.at == step:
                    engine.add_request(
                        str(number),
                        {"prompt_token_ids": list(arrival.prompt)},
                        arrival.params,
                        priority=arrival.priority,
                    )
                if arrival.abort_at == step:
                    engine.abort_request([str(number)])
            for output in engine.step():
                if output.finished and output.outputs[0].finish_reason != "abort":
                    run.tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            if watch is not None and (chosen := watch(step, runner_of(llm))):
                engine.abort_request([str(number) for number in chosen])
            step += 1
    finally:
        scheduler._preempt_request = stock
    return run


def assert_nothing_left(llm: Any, free: int) -> None:
    """Every block is free again, and the worker remembers nothing once its next step has begun."""
    assert free_blocks(llm) == free
    drive(llm, [Arrival([5], _one_token())])  # the worker hears of ended requests with the next step
    runner = runner_of(llm)
    assert len(runner.requests) <= 1
    assert len(runner.pending) <= 1
    assert len(runner.drafter.backlog) <= 1
    assert len(runner.policy.signals) <= 1
    assert free_blocks(llm) == free


def _one_token() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, detokenize=False)
