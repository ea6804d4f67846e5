"""The margin rule on the real engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, scaled, truth_of
from tests.e2e.oracle import decode_with_oracle

TOKENS = scaled(40)


@pytest.fixture(scope="module")
def prompts() -> list:
    return random_prompts(6, seed=41)


def margins_of(plain: Any, prompts: list, tokens: list[list[int]]) -> list[list[float]]:
    """Log-probability of each emitted token under the target, less that of the target's choice (0 or below)."""
    texts = [{"prompt_token_ids": p["prompt_token_ids"] + t} for p, t in zip(prompts, tokens, strict=True)]
    outputs = plain.generate(texts, greedy(1, prompt_logprobs=1), use_tqdm=False)
    losses = []
    for prompt, output in zip(prompts, outputs, strict=True):
        entries = output.prompt_logprobs[len(prompt["prompt_token_ids"]) :]
        ids = output.prompt_token_ids[len(prompt["prompt_token_ids"]) :]
        losses.append([e[i].logprob - max(x.logprob for x in e.values()) for e, i in zip(entries, ids, strict=True)])
    return losses


def second_choices(plain: Any, prompts: list) -> list[list[int]]:
    """Texts that take the target's second choice wherever it is close to the first: what a margin promotes."""
    outputs = plain.generate(prompts, greedy(TOKENS, logprobs=2), use_tqdm=False)
    return [
        [sorted(e.items(), key=lambda kv: -kv[1].logprob)[1][0] for e in output.outputs[0].logprobs]
        for output in outputs
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_kappa_one_is_strict(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, prompts: list, temperature: float
) -> None:
    params = greedy(TOKENS, temperature=temperature, seed=3)
    expected = generate(plain, prompts, params)
    llm = make_llm(speculative_config=adaptivespec(tiny_head, margin={"kappa": 1.0}))
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, expected), params)
    assert tokens == expected
    assert stats["promotions"] == 0


def test_promoted_tokens_keep_their_margin(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, prompts: list
) -> None:
    """Replay: every emitted token has at least kappa of the probability of the target's choice."""
    kappa = 0.2
    llm = make_llm(speculative_config=adaptivespec(tiny_head, margin={"kappa": kappa}))
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, second_choices(plain, prompts)), greedy(TOKENS))
    assert stats["promotions"] > 5
    losses = [loss for text in margins_of(plain, prompts, tokens) for loss in text]
    assert min(losses) >= math.log(kappa) - 1e-4
    assert sum(loss < -1e-4 for loss in losses) >= stats["promotions"] - len(prompts)
    assert stats["regret"] == pytest.approx(-sum(losses), rel=0.15)


def test_promotions_are_capped(make_llm: Callable[..., Any], tiny_head: Path, plain: Any, prompts: list) -> None:
    truth = truth_of(prompts, second_choices(plain, prompts))
    section = {"kappa": 0.05, "max_promotions_per_step": 1}
    llm = make_llm(speculative_config=adaptivespec(tiny_head, margin=section))
    _, stats = decode_with_oracle(llm, prompts, truth, greedy(TOKENS))
    assert 0 < stats["promotions"] <= stats["steps"]


def test_regret_budget(make_llm: Callable[..., Any], tiny_head: Path, plain: Any, prompts: list) -> None:
    budget = 1.5
    sections = {"margin": {"kappa": 0.05}, "guard": {"max_regret": budget}}
    llm = make_llm(speculative_config=adaptivespec(tiny_head, **sections))
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, second_choices(plain, prompts)), greedy(TOKENS))
    assert stats["promotions"] > 0
    for losses in margins_of(plain, prompts, tokens):
        assert -sum(losses) <= budget + 1e-3


def test_a_tiny_kappa_accepts_whole_chains(make_llm: Callable[..., Any], tiny_head: Path, prompts: list) -> None:
    chain = {"policy": "static", "shape": {"depth": 5, "width": 1, "nodes": 5}}
    llm = make_llm(speculative_config=adaptivespec(tiny_head, tree=chain, margin={"kappa": 1e-30}))
    llm.collective_rpc("adaptivespec_stats")
    generate(llm, prompts, greedy(TOKENS))
    stats = llm.collective_rpc("adaptivespec_stats")[0]
    assert stats["drafted_nodes"] > 0
    assert stats["accepted"] == stats["drafted_nodes"]


def test_stop_tokens_are_never_promoted(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, prompts: list
) -> None:
    second = second_choices(plain, prompts)
    stop = sorted({token for text in second for token in text})
    llm = make_llm(speculative_config=adaptivespec(tiny_head, margin={"kappa": 1e-6}))
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, second), greedy(TOKENS, stop_token_ids=stop))
    expected = generate(plain, prompts, greedy(TOKENS, stop_token_ids=stop))
    # All hidden tokens are stop tokens: nothing can be promoted to or away from them.
    assert tokens == expected or stats["promotions"] == 0 or all(t[-1] in stop for t in tokens)
    losses = margins_of(plain, prompts, [t[-1:] and t for t in tokens])
    assert all(text[-1] >= -1e-4 for text, t in zip(losses, tokens, strict=True) if t[-1] in stop)


def test_margin_at_temperature(make_llm: Callable[..., Any], tiny_head: Path, plain: Any, prompts: list) -> None:
    """Promotion works in the stepwise walk, on the tempered, truncated distribution."""
    params = greedy(TOKENS, temperature=0.7, top_k=5, seed=9)
    strict = generate(plain, prompts, params)
    llm = make_llm(speculative_config=adaptivespec(tiny_head, margin={"kappa": 0.1}))
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, second_choices(plain, prompts)), params)
    assert stats["promotions"] > 0
    assert tokens != strict
