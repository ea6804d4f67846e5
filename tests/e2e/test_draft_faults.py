"""Errors thrown into the middle of a step: drafting may fail, verification must not be wrong silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.engine.v1.faults import DraftFaults
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts
from tests.e2e.oracle import runner_of

TOKENS = 40


def failing(stock: Callable[..., Any], every: int = 1) -> Callable[..., Any]:
    """The function, which raises in each call of so many."""
    calls = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) % every == 0:
            raise RuntimeError("thrown by the test")
        return stock(*args, **kwargs)

    return call


PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "policy, begin": lambda runner: (runner.policy, "begin"),
    "policy, learning": lambda runner: (runner.policy, "observe"),
    "first pass": lambda runner: (runner.drafter, "_pass"),
    "level": lambda runner: (runner.drafter.head, "level"),
    "hand-over": lambda runner: (runner.drafter, "_fit"),
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_drafting_that_fails_costs_only_drafts(
    trees: Any, plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str, every: int
) -> None:
    prompts = random_prompts(6, seed=501)
    expected = generate(plain, prompts, greedy(TOKENS))
    runner = runner_of(trees)
    runner.faults = DraftFaults(ranks=1)
    trees.reset_prefix_cache()
    owner, name = PLACES[place](runner)
    with monkeypatch.context() as thrown:
        thrown.setattr(owner, name, failing(getattr(owner, name), every))
        assert generate(trees, prompts, greedy(TOKENS)) == expected
    assert runner.faults.count > 3
    shown = [record for record in caplog.records if record.exc_info]
    assert len(shown) == 1 and "thrown by the test" in str(shown[0].exc_info[1])
    # Once it works again, requests draft again.
    trees.collective_rpc("adaptivespec_stats")
    count = runner.faults.count
    assert generate(trees, prompts, greedy(TOKENS)) == expected
    assert trees.collective_rpc("adaptivespec_stats")[0]["drafted_nodes"] > 100
    assert runner.faults.count == count


def test_drafting_that_fails_from_the_first_step_on(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with costs that are measured and an overhead that is learnt from whole steps."""
    prompts = random_prompts(3, seed=502)
    llm = make_llm(speculative_config={"method": "adaptivespec", "model": str(tiny_head)})
    runner = runner_of(llm)
    monkeypatch.setattr(runner.policy, "begin", failing(runner.policy.begin))
    assert generate(llm, prompts, greedy(TOKENS)) == generate(plain, prompts, greedy(TOKENS))
    assert runner.faults.count > TOKENS / 2


def test_ranks_that_decode_together_do_not_part() -> None:
    """One that goes on without a tree would leave the others waiting for it."""
    with pytest.raises(RuntimeError), DraftFaults(ranks=2).tolerated("drafting"):
        raise RuntimeError


@pytest.mark.parametrize("name", ["forward", "_logprobs"])
def test_an_error_of_verification_is_raised(
    make_llm: Callable[..., Any], tiny_head: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    llm = make_llm(speculative_config=adaptivespec(tiny_head))
    sampler = runner_of(llm).rejection_sampler
    monkeypatch.setattr(sampler, name, failing(getattr(sampler, name)))
    engine = llm.llm_engine
    engine.add_request("0", random_prompts(1, seed=503)[0], greedy(TOKENS, logprobs=1))
    with pytest.raises(RuntimeError, match="thrown by the test"):
        for _ in range(10):
            engine.step()
