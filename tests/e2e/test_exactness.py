"""Strict greedy decoding with trees is plain decoding, token for token, wherever a tree can go wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, scaled, truth_of
from tests.e2e.oracle import Oracle, hiding, runner_of

TOKENS = scaled(48)


def decode_with_oracle(llm: Any, prompts: list, truth: dict, params: Any, **oracle: Any) -> tuple[list, dict]:
    """Decode with hidden truths; returns the tokens and the worker's statistics."""
    with hiding(llm, truth, **oracle) as worker_stats:
        tokens = generate(llm, prompts, params)
    assert worker_stats["accepted"] > len(prompts), "the oracle's truths were not accepted: the test would be vacuous"
    return tokens, worker_stats


@pytest.fixture(scope="module")
def prompts() -> list:
    return random_prompts(10)


@pytest.fixture(scope="module")
def expected(plain: Any, prompts: list) -> list[list[int]]:
    return generate(plain, prompts, greedy(TOKENS))


@pytest.mark.parametrize("batch", [1, 10])
@pytest.mark.parametrize("seed", [0, 1])
def test_batches(trees: Any, prompts: list, expected: list, batch: int, seed: int) -> None:
    truth = truth_of(prompts, expected)
    for first in range(0, len(prompts), batch):
        chosen = slice(first, first + batch)
        tokens, _ = decode_with_oracle(trees, prompts[chosen], truth, greedy(TOKENS), seed=seed)
        assert tokens == expected[chosen]


def test_without_the_commit_it_fails(
    trees: Any, prompts: list, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: these tests see a missing commit of accepted keys and values."""
    monkeypatch.setattr(runner_of(trees), "_commit", lambda step: None)
    trees.reset_prefix_cache()
    tokens, _ = decode_with_oracle(trees, prompts, truth_of(prompts, expected), greedy(TOKENS))
    trees.reset_prefix_cache()
    assert all(got != want for got, want in zip(tokens, expected, strict=True))


def test_hidden_truths_are_accepted_whole(trees: Any, prompts: list, expected: list) -> None:
    """Exactly the hidden length is accepted at every step (no sibling shortens it, none lengthens it)."""
    drafts = Oracle(runner_of(trees), truth_of(prompts, expected), seed=3)
    trees.collective_rpc("adaptivespec_stats")
    try:
        generate(trees, prompts[:1], greedy(TOKENS))
    finally:
        drafts.remove()
    stats = trees.collective_rpc("adaptivespec_stats")[0]
    # The last tree is drafted, but its request has ended.
    assert stats["accepted"] in (sum(drafts.hidden_lengths), sum(drafts.hidden_lengths[:-1]))


def test_own_drafts(trees: Any, prompts: list, expected: list) -> None:
    assert generate(trees, prompts, greedy(TOKENS)) == expected


def test_chunked_prefill_beside_trees(make_llm: Callable[..., Any], tiny_head: Path, plain: Any) -> None:
    """Prefill chunks, trees and trees cut by the token budget in one batch."""
    prompts = random_prompts(8, seed=5, shortest=30, longest=90)
    expected = generate(plain, prompts, greedy(TOKENS))
    llm = make_llm(speculative_config=adaptivespec(tiny_head), max_num_batched_tokens=40, enable_chunked_prefill=True)
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, expected), greedy(TOKENS))
    assert tokens == expected
    assert not stats["chains"]


def test_preemption_and_resume(make_llm: Callable[..., Any], tiny_head: Path, plain: Any) -> None:
    prompts = random_prompts(6, seed=6, shortest=40, longest=60)
    expected = generate(plain, prompts, greedy(scaled(100)))
    llm = make_llm(speculative_config=adaptivespec(tiny_head), block_size=32, num_gpu_blocks_override=18)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    stock = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *args, **kwargs: (
        preempted.append(request.request_id),
        stock(request, *args, **kwargs),
    )[1]
    tokens, _ = decode_with_oracle(llm, prompts, truth_of(prompts, expected), greedy(scaled(100)))
    assert preempted, "the cache was large enough: nothing was tested"
    assert tokens == expected


def test_second_turn_from_the_prefix_cache(trees: Any, plain: Any) -> None:
    """Blocks that were filled by trees are found again and hold the right keys and values."""
    prompts = random_prompts(4, seed=7, shortest=100, longest=120)
    first = generate(plain, prompts, greedy(60))
    turns = [{"prompt_token_ids": [*p["prompt_token_ids"], *t, 17, 23]} for p, t in zip(prompts, first, strict=True)]
    expected = generate(plain, turns, greedy(30))
    trees.reset_prefix_cache()
    decode_with_oracle(trees, prompts, truth_of(prompts, first), greedy(60))
    drafts = Oracle(runner_of(trees), truth_of(turns, expected))
    try:
        outputs = trees.generate(turns, greedy(30), use_tqdm=False)
    finally:
        drafts.remove()
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.num_cached_tokens > len(prompt["prompt_token_ids"]), "no block of tree-decoded tokens was reused"


@pytest.mark.parametrize("length", [255, 254, 250, 200])
def test_last_tokens_before_max_model_len(trees: Any, plain: Any, length: int) -> None:
    prompts = random_prompts(3, seed=length, shortest=length, longest=length)
    params = greedy(1000)
    expected = generate(plain, prompts, params)
    drafts = Oracle(runner_of(trees), truth_of(prompts, expected))
    try:
        tokens = generate(trees, prompts, params)
    finally:
        drafts.remove()
    assert tokens == expected
    assert all(len(t) == 256 - length for t in tokens)


def test_compiled(make_llm: Callable[..., Any], tiny_head: Path, plain: Any, prompts: list, expected: list) -> None:
    llm = make_llm(speculative_config=adaptivespec(tiny_head), enforce_eager=False)
    tokens, _ = decode_with_oracle(llm, prompts, truth_of(prompts, expected), greedy(TOKENS))
    assert tokens == expected
    assert generate(llm, prompts, greedy(TOKENS)) == expected
