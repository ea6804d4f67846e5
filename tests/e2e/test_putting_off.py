"""Requests that do not draft for a while: the head sees their tokens later, and drafts as if it had seen them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.policy.base import Drafting
from adaptivespec_vllm.policy.static import StaticPolicy
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts
from tests.e2e.oracle import runner_of

TOKENS = 40

Drafts = dict[tuple[tuple[int, ...], int], list[int]]
"""Tokens of a tree, by prompt and position of its root."""


class Sometimes(StaticPolicy):
    """Lets a request draft in one step of ``every``, requests at different times."""

    def __init__(self, config: Any, every: int) -> None:
        super().__init__(config)
        self._every = every
        self._steps: dict[str, int] = {}

    def begin(self, requests: Sequence[str], decoding: Sequence[bool], rows: Sequence[int] | None = None) -> Drafting:
        drafting = super().begin(requests, decoding, rows)
        for b, request in enumerate(requests):
            step = self._steps[request] = self._steps.get(request, sum(map(ord, request))) + 1
            drafting.drafts[b] = decoding[b] and step % self._every == 0
        return drafting


@contextmanager
def watched(llm: Any, every: int) -> Iterator[Drafts]:
    """Drafts of an engine whose requests draft in one step of ``every``."""
    runner, seen = runner_of(llm), {}
    policy, keep = runner.policy, runner.keep_trees

    def keep_trees(trees: list) -> list[list[int]]:
        for request, tree in zip(runner.input_batch.req_ids, trees, strict=True):
            if len(tree):
                seen[tuple(runner.requests[request].prompt_token_ids), tree.root_position] = tree.tokens
        return keep(trees)

    runner.policy, runner.keep_trees = Sometimes(runner.settings, every), keep_trees
    try:
        yield seen
    finally:
        runner.policy, runner.keep_trees = policy, keep
        policy.signals.clear()  # those requests have ended without it


@pytest.mark.parametrize("batch", [1, 6])
def test_drafts_are_those_of_a_head_that_saw_every_token_at_once(trees: Any, plain: Any, batch: int) -> None:
    prompts = random_prompts(6, seed=300 + batch, longest=120)
    expected = generate(plain, prompts, greedy(TOKENS))
    drafts: dict[int, Drafts] = {}
    for every in (1, 5):
        with watched(trees, every) as seen:
            tokens = []
            for first in range(0, len(prompts), batch):
                tokens += generate(trees, prompts[first : first + batch], greedy(TOKENS))
        assert tokens == expected
        drafts[every] = seen
    both = drafts[1].keys() & drafts[5].keys()
    assert len(both) > 25
    assert len(drafts[5]) < 0.35 * len(drafts[1])
    # A pass over several rows rounds otherwise than several passes: near-ties of a random head may fall differently.
    same = sum(drafts[1][place] == drafts[5][place] for place in both)
    assert same >= 0.95 * len(both)
    # Requests are taken off a runner's books when its next step begins.
    assert len(runner_of(trees).drafter.backlog) <= batch


def test_a_backlog_that_is_lost_shows(trees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round: with holes in the head's cache the drafts differ, so the test above can fail."""
    prompts = random_prompts(6, seed=301, longest=120)
    with watched(trees, 1) as right:
        generate(trees, prompts, greedy(TOKENS))
    monkeypatch.setattr(runner_of(trees).drafter.backlog, "put", lambda request, rows, end: None)
    with watched(trees, 5) as wrong:
        generate(trees, prompts, greedy(TOKENS))
    both = right.keys() & wrong.keys()
    assert len(both) > 25
    assert sum(right[place] == wrong[place] for place in both) < 0.9 * len(both)


def costs_file(path: Path, head_seconds: float) -> str:
    """Costs of a head that is cheap or dear."""
    tables = {"target": [[1, 1.0], [64, 1.5]], "first": [[1, head_seconds]], "level": [[1, head_seconds]]}
    path.write_text(json.dumps(tables))
    return str(path)


def test_a_head_that_never_pays_is_left_alone(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = costs_file(tmp_path / "costs.json", 0.5)
    llm = make_llm(speculative_config=adaptivespec(tiny_head, tree={"costs": costs}))
    prompts = random_prompts(6, seed=302)
    passes = []
    runner = runner_of(llm)
    own = runner.drafter._pass
    monkeypatch.setattr(runner.drafter, "_pass", lambda *args: (passes.append(1), own(*args)))
    llm.collective_rpc("adaptivespec_stats")
    assert generate(llm, prompts, greedy(150)) == generate(plain, prompts, greedy(150))
    steps = llm.collective_rpc("adaptivespec_stats")[0]["engine_steps"]
    # Prompts are read by the head; after that there are only probes, ever more rarely.
    assert steps > 140 and len(passes) < 0.25 * steps
    assert len(runner.drafter.backlog) <= len(prompts)


def test_rows_that_wait_fit_into_a_small_pass(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = costs_file(tmp_path / "costs.json", 0.5)
    llm = make_llm(
        speculative_config=adaptivespec(tiny_head, tree={"costs": costs}), max_num_batched_tokens=40, max_num_seqs=4
    )
    drafter, longest = runner_of(llm).drafter, []
    own = drafter.backlog.put

    def put(request: str, rows: Any, end: int) -> None:
        own(request, rows, end)
        longest.append(sum(map(len, drafter.backlog.parts[request])))

    monkeypatch.setattr(drafter.backlog, "put", put)
    prompts = random_prompts(4, seed=303)
    assert generate(llm, prompts, greedy(150)) == generate(plain, prompts, greedy(150))
    assert 10 < max(longest) <= 20 + 4  # a row more for each request that comes before it
