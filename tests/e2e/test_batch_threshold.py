"""A policy that drafts nothing from some batch size on, and again below it: the plain path, same text, no stall."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from adaptivespec_vllm.policy.base import Drafting
from adaptivespec_vllm.policy.static import StaticPolicy
from adaptivespec_vllm.types import DraftTree
from tests.e2e.conftest import generate, greedy, random_prompts, truth_of
from tests.e2e.oracle import Oracle, runner_of
from tests.e2e.scarce import Arrival, drive

MOST = 4
"""Requests of the largest batch that drafts."""


class UpTo(StaticPolicy):
    """Drafts in batches of at most ``MOST`` requests."""

    def begin(self, requests: Sequence[str], decoding: Sequence[bool], rows: Sequence[int] | None = None) -> Drafting:
        drafting = super().begin(requests, decoding, rows)
        if len(requests) > MOST:
            drafting.drafts[:] = [False] * len(requests)
        return drafting


class ObedientOracle(Oracle):
    """Hides truths in the trees of batches that the policy lets draft."""

    def _draft(self, roots: list[int], block_table: Any) -> list[list[int]]:
        if any(self._runner.drafts):
            return super()._draft(roots, block_table)
        return self._runner.keep_trees([DraftTree([], [], root) for root in roots])


@dataclass
class Seen:
    """Of each engine step: requests, rows beyond one a request, and whether the head ran."""

    batches: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    passes: int = 0
    passes_while_off: int = 0


@contextmanager
def stepwise(llm: Any, truth: dict, patch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """An engine with that policy and hidden truths; what its steps were."""
    runner, seen = runner_of(llm), Seen()
    policy = UpTo(runner.settings)
    policy.signals = runner.policy.signals
    execute, head_pass = runner.execute_model, runner.drafter._pass

    def execute_model(scheduler_output: Any, *args: Any) -> Any:
        decoding = scheduler_output.scheduled_cached_reqs.num_reqs
        if scheduler_output.total_num_scheduled_tokens and not scheduler_output.scheduled_new_reqs:
            seen.batches.append(decoding)
            seen.drafts.append(sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values())))
        return execute(scheduler_output, *args)

    def run_pass(*args: Any) -> None:
        seen.passes += 1
        seen.passes_while_off += runner.input_batch.num_reqs > MOST
        head_pass(*args)

    patch.setattr(runner, "policy", policy)
    patch.setattr(runner, "execute_model", execute_model)
    patch.setattr(runner.drafter, "_pass", run_pass)
    oracle = ObedientOracle(runner, truth)
    llm.collective_rpc("adaptivespec_stats")
    try:
        yield seen
    finally:
        oracle.remove()
        patch.undo()


def test_drafting_ends_at_the_threshold_and_comes_back_below_it(
    trees: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests, then eight, then fewer and fewer; twice."""
    prompts = random_prompts(8, seed=701)
    lengths = [180, 150, 60, 60, 55, 50, 45, 40]
    params = [greedy(length) for length in lengths]
    expected = generate(plain, prompts, params)
    arrivals = [
        Arrival(prompt["prompt_token_ids"], own, at=0 if n < 2 else 12)
        for n, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]
    for _ in range(2):
        with stepwise(trees, truth_of(prompts, expected), monkeypatch) as seen:
            run = drive(trees, arrivals)
        stats = trees.collective_rpc("adaptivespec_stats")[0]
        assert [run.tokens[n] for n in range(8)] == expected
        # Drafts that are verified in a step were drafted in the one before, in its batch.
        for before, batch, drafts in zip(seen.batches, seen.batches[1:], seen.drafts[1:], strict=False):
            if before > MOST and batch > MOST:
                assert not drafts
        on = [drafts for batch, drafts in zip(seen.batches, seen.drafts, strict=True) if batch <= MOST]
        off = sum(batch > MOST for batch in seen.batches)
        assert off > 25 and seen.batches.index(8) > 5
        assert sum(map(bool, on)) > 0.6 * len(on) > 15
        # No stall: what eight requests do plainly takes a step a token, and the rest is faster.
        assert stats["engine_steps"] < max(lengths)
        assert stats["plain_engine_steps"] >= off - 2
        # The head reads prompts, and nothing else but backlogs of more than half a pass, while nothing is drafted.
        assert seen.passes_while_off <= 2
        assert stats["accepted"] > 50


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
def test_no_nodes_is_the_plain_path(
    trees: Any, plain: Any, monkeypatch: pytest.MonkeyPatch, batch: int, sampling: dict[str, Any]
) -> None:
    """``adaptivespec_max_nodes`` 0: a step a token, a row a request, and the head sees nothing but the prompts."""
    prompts = random_prompts(batch, seed=702)
    runner = runner_of(trees)
    rows, passes = [], []
    walk, head_pass = runner.rejection_sampler.forward, runner.drafter._pass
    monkeypatch.setattr(runner.rejection_sampler, "forward", lambda *args: (rows.append(len(args[2])), walk(*args))[1])
    monkeypatch.setattr(runner.drafter, "_pass", lambda *args: (passes.append(1), head_pass(*args)))
    trees.collective_rpc("adaptivespec_stats")
    params = greedy(60, extra_args={"adaptivespec_max_nodes": 0}, **sampling)
    assert generate(trees, prompts, params) == generate(plain, prompts, greedy(60, **sampling))
    stats = trees.collective_rpc("adaptivespec_stats")[0]
    assert stats["engine_steps"] == stats["plain_engine_steps"] == 60
    assert rows == [batch] * 60
    assert len(passes) <= 1
