"""Every sampling parameter gives the tokens of plain decoding, on trees, in mixed batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2_contingency

from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, scaled, truth_of
from tests.e2e.oracle import Oracle, hiding, runner_of

TOKENS = scaled(40)

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition penalty": {"repetition_penalty": 1.4},
    "frequency and presence penalty": {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    "allowed tokens": {"allowed_token_ids": list(range(3, 400, 3))},
    "seeded": {"temperature": 0.8, "seed": 11},
    "seeded, truncated": {"temperature": 1.2, "top_p": 0.9, "top_k": 30, "seed": 12},
    "seeded, penalized": {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 13},
    "logprobs": {"logprobs": 3},
}


def parameters(name: str, **overrides: Any) -> Any:
    return greedy(TOKENS, **(PARAMETERS[name] | overrides))


def decode(llm: Any, prompts: list, truth: dict, params: Any) -> list[Any]:
    """Decode with hidden truths; the outputs as vLLM returns them."""
    with hiding(llm, truth) as stats:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert stats["accepted"] > 0, "nothing was accepted: vacuous"
    return outputs


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", PARAMETERS)
def test_equal_to_plain_decoding(trees: Any, plain: Any, name: str) -> None:
    prompts = random_prompts(4, seed=21)
    expected = generate(plain, prompts, parameters(name))
    assert tokens_of(decode(trees, prompts, truth_of(prompts, expected), parameters(name))) == expected


def test_mixed_batch(trees: Any, plain: Any) -> None:
    """One batch with every kind of request at once."""
    prompts = random_prompts(len(PARAMETERS), seed=22)
    params = [parameters(name) for name in PARAMETERS]
    expected = generate(plain, prompts, params)
    assert tokens_of(decode(trees, prompts, truth_of(prompts, expected), params)) == expected


def test_seeds_do_not_depend_on_the_trees(trees: Any, plain: Any) -> None:
    """Different trees, same seed, same tokens; another seed, other tokens."""
    prompts = random_prompts(3, seed=23)
    expected = generate(plain, prompts, parameters("seeded"))
    for seed in (0, 1, 2):
        drafts = Oracle(runner_of(trees), truth_of(prompts, expected), seed=seed)
        try:
            assert generate(trees, prompts, parameters("seeded")) == expected
        finally:
            drafts.remove()
    assert generate(trees, prompts, parameters("seeded", seed=99)) != expected


def test_seeded_request_prefilled_in_chunks(make_llm: Callable[..., Any], tiny_head: Path, plain: Any) -> None:
    """Partial prefills use up no noise: the tokens are those of an unchunked prefill."""
    prompts = random_prompts(4, seed=24, shortest=60, longest=90)
    expected = generate(plain, prompts, parameters("seeded"))
    llm = make_llm(speculative_config=adaptivespec(tiny_head), max_num_batched_tokens=32, enable_chunked_prefill=True)
    assert tokens_of(decode(llm, prompts, truth_of(prompts, expected), parameters("seeded"))) == expected


@pytest.mark.parametrize("least", [3, 20])
def test_min_tokens(trees: Any, plain: Any, least: int) -> None:
    """Stop tokens are banned below ``min_tokens`` and free from there on, inside a tree as outside."""
    prompts = random_prompts(6, seed=25)
    stop = list(range(3, 512, 6))
    params = greedy(TOKENS, min_tokens=least, stop_token_ids=stop)
    expected = generate(plain, prompts, params)
    assert all(least <= len(t) for t in expected)
    # The hidden truth goes on past the stop: an early stop must come from the target, not from the drafts' end.
    truth = truth_of(prompts, [t + [5] * TOKENS for t in expected])
    assert tokens_of(decode(trees, prompts, truth, params)) == expected


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_logprobs(make_llm: Callable[..., Any], tiny_head: Path, mode: str) -> None:
    """One entry an emitted token, each the target's, equal to plain decoding's."""
    prompts = random_prompts(4, seed=26)
    params = [
        greedy(TOKENS, logprobs=3),
        greedy(TOKENS, logprobs=2, repetition_penalty=1.3),
        greedy(TOKENS, logprobs=1, temperature=0.9, seed=5, top_k=40),
        greedy(TOKENS),
    ]
    plain = make_llm(logprobs_mode=mode)
    ours = make_llm(logprobs_mode=mode, speculative_config=adaptivespec(tiny_head))
    want = plain.generate(prompts, params, use_tqdm=False)
    got = decode(ours, prompts, truth_of(prompts, tokens_of(want)), params)
    assert tokens_of(got) == tokens_of(want)
    for ours_out, plain_out in zip(got, want, strict=True):
        ours_lp, plain_lp = ours_out.outputs[0].logprobs, plain_out.outputs[0].logprobs
        assert (ours_lp is None) == (plain_lp is None)
        for a, b in zip(ours_lp or [], plain_lp or [], strict=True):
            assert a.keys() == b.keys()
            for token in a:
                assert a[token].rank == b[token].rank
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_of_chosen_tokens(make_llm: Callable[..., Any], tiny_head: Path, mode: str) -> None:
    prompts = random_prompts(3, seed=29)
    chosen = [5, 77, 300]
    plain = make_llm(logprobs_mode=mode)
    ours = make_llm(logprobs_mode=mode, speculative_config=adaptivespec(tiny_head))
    for sampling in ({}, {"temperature": 0.8, "seed": 7}, {"repetition_penalty": 1.3}):
        params = greedy(TOKENS, logprob_token_ids=chosen, **sampling)
        want = plain.generate(prompts, params, use_tqdm=False)
        got = decode(ours, prompts, truth_of(prompts, tokens_of(want)), params)
        assert tokens_of(got) == tokens_of(want)
        for mine, theirs in zip(got, want, strict=True):
            for a, b in zip(mine.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
                assert a.keys() == b.keys() and set(chosen) <= a.keys()
                assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in a)


@pytest.mark.parametrize("max_depth", [1, 2, 4])
def test_distribution_at_temperature_one(trees: Any, plain: Any, max_depth: int) -> None:
    """Chi-square: unseeded tokens behind one prompt are distributed as those of plain decoding."""
    prompt = random_prompts(1, seed=27)[0]
    params = greedy(3, temperature=1.0, top_k=6)
    repeats = [prompt] * 1500
    likely = generate(plain, [prompt], greedy(3))[0]

    drafts = Oracle(runner_of(trees), truth_of([prompt], [likely]), max_depth=max_depth, seed=max_depth)
    trees.collective_rpc("adaptivespec_stats")
    try:
        ours = generate(trees, repeats, params)
    finally:
        drafts.remove()
    assert trees.collective_rpc("adaptivespec_stats")[0]["accepted"] > 100
    theirs = generate(plain, repeats, params)
    for position in range(3):
        counts = [[tokens[position] for tokens in sample] for sample in (ours, theirs)]
        both = counts[0] + counts[1]
        kinds = [t for t in sorted(set(both)) if both.count(t) >= 20]
        table = [[c.count(t) for t in kinds] + [sum(t not in kinds for t in c)] for c in counts]
        table = [[row[i] for i in range(len(row)) if table[0][i] + table[1][i]] for row in table]
        assert len(table[0]) > 1
        assert chi2_contingency(table).pvalue > 1e-4


def test_seeded_request_does_not_disturb_others(trees: Any, plain: Any) -> None:
    """Done requests of a batch use up no noise of seeded ones that still walk."""
    prompts = random_prompts(6, seed=28)
    params = [parameters("seeded", seed=i, max_tokens=5 + 7 * i) for i in range(6)]
    expected = generate(plain, prompts, params)
    assert tokens_of(decode(trees, prompts, truth_of(prompts, expected), params)) == expected
