"""A request's own margin, nodes and shape: honoured for it, and nobody else in the batch is affected."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.types import DraftTree
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, truth_of
from tests.e2e.oracle import Oracle, decode_with_oracle, runner_of
from tests.e2e.test_margin import margins_of, second_choices

TOKENS = 40


def overriding(**overrides: Any) -> Any:
    return greedy(TOKENS, extra_args={f"adaptivespec_{name}": value for name, value in overrides.items()})


@contextmanager
def drafted_trees(llm: Any) -> Iterator[dict[str, list[DraftTree]]]:
    """All trees that the runner drafts meanwhile, by request."""
    runner = runner_of(llm)
    trees, keep = defaultdict(list), runner.keep_trees

    def watch(drafted: list[DraftTree]) -> Any:
        for req_id, tree in zip(runner.input_batch.req_ids, drafted, strict=True):
            trees[req_id].append(tree)
        return keep(drafted)

    runner.keep_trees = watch
    try:
        yield trees
    finally:
        runner.keep_trees = keep


def watched(llm: Any, prompts: list, params: list[Any]) -> tuple[list[list[int]], list[list[DraftTree]]]:
    """Tokens, and the trees that the head drafted, of each request."""
    with drafted_trees(llm) as trees:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    by_request = {req_id.split("-")[0]: drafted for req_id, drafted in trees.items()}
    return [list(o.outputs[0].token_ids) for o in outputs], [by_request[o.request_id] for o in outputs]


@pytest.fixture(scope="module")
def prompts() -> list:
    return random_prompts(6, seed=121)


@pytest.fixture(scope="module")
def expected(plain: Any, prompts: list) -> list[list[int]]:
    return generate(plain, prompts, greedy(TOKENS))


@pytest.mark.parametrize("policy", ["static", "adaptive", "cost-aware"])
def test_nodes_and_shapes(
    make_llm: Callable[..., Any], tiny_head: Path, prompts: list, expected: list, policy: str
) -> None:
    trees = {
        "static": {"policy": "static", "shape": {"depth": 8, "width": 4, "nodes": 16}},
        "adaptive": {"policy": "adaptive", "min_path_probability": 0, "high": {"depth": 8, "width": 2, "nodes": 16}},
        "cost-aware": {"policy": "cost-aware", "shape": {"depth": 8, "width": 4, "nodes": 16}},
    }
    llm = make_llm(speculative_config=adaptivespec(tiny_head, tree=trees[policy]))
    params = [
        overriding(max_nodes=0),
        overriding(max_nodes=2),
        overriding(shape="2,4,10"),
        overriding(shape=[8, 1, 8]),
        overriding(shape=[6, 4, 16], max_nodes=9),
        greedy(TOKENS),
    ]
    tokens, drafted = watched(llm, prompts, params)
    assert tokens == expected
    off, two, wide, deep, cut, free = drafted
    assert not any(len(tree) for tree in off)
    assert max(len(tree) for tree in two) <= 2
    assert all(max(tree.depths(), default=0) <= 2 and len(tree) <= 10 for tree in wide)
    assert all(tree.parents == list(range(len(tree))) for tree in deep)
    assert max(len(tree) for tree in cut) <= 9
    if policy == "static":  # it always drafts what may be drafted
        assert {len(tree) for tree in two[:-3]} == {2}
        assert max(tree.depths().count(1) for tree in wide) == 4 and max(len(tree) for tree in wide) == 10
        assert max(max(tree.depths(), default=0) for tree in deep) == 8
        assert max(len(tree) for tree in cut) == 9
        assert max(len(tree) for tree in free) == 16


def test_trees_of_others_are_what_they_would_be(
    make_llm: Callable[..., Any], tiny_head: Path, prompts: list, expected: list
) -> None:
    """The same request drafts the same trees, whatever others of its batch ask for."""
    llm = make_llm(speculative_config=adaptivespec(tiny_head))
    plainly = [greedy(TOKENS)] * 2
    others = [overriding(max_nodes=0), overriding(shape=[2, 8, 9]), overriding(max_nodes=1), overriding(margin=0)]
    alone, alone_trees = watched(llm, prompts[:2], plainly)
    tokens, drafted = watched(llm, prompts, [*plainly, *others])
    assert (alone, tokens) == (expected[:2], expected)
    assert [[tree.tokens for tree in trees] for trees in drafted[:2]] == [
        [tree.tokens for tree in trees] for trees in alone_trees
    ]


def test_nobody_drafts(trees: Any, prompts: list, expected: list) -> None:
    """Without a request that drafts the head is not run; one that drafts again later finds its cache complete."""
    trees.collective_rpc("adaptivespec_stats")
    assert generate(trees, prompts, overriding(max_nodes=0)) == expected
    stats = trees.collective_rpc("adaptivespec_stats")[0]
    assert stats["drafted_nodes"] == stats["accepted"] == 0
    tokens, stats = decode_with_oracle(trees, prompts, truth_of(prompts, expected), greedy(TOKENS))
    assert tokens == expected and stats["accepted"] > 30


def decode_second_choices(llm: Any, plain: Any, prompts: list, params: list[Any]) -> tuple[list[list[int]], dict]:
    drafts = Oracle(runner_of(llm), truth_of(prompts, second_choices(plain, prompts)))
    llm.collective_rpc("adaptivespec_stats")
    try:
        tokens = generate(llm, prompts, params)
    finally:
        drafts.remove()
    return tokens, llm.collective_rpc("adaptivespec_stats")[0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_strict_requests_beside_lossy_ones(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, prompts: list, temperature: float
) -> None:
    llm = make_llm(speculative_config=adaptivespec(tiny_head, margin={"kappa": 0.05}))
    margins = [0, "off", 1.0, 0.05, 0.4, None]
    params = [
        greedy(
            TOKENS,
            temperature=temperature,
            seed=i,
            extra_args=None if margin is None else {"adaptivespec_margin": margin},
        )
        for i, margin in enumerate(margins)
    ]
    expected = generate(plain, prompts, params)
    tokens, stats = decode_second_choices(llm, plain, prompts, params)
    assert tokens[:3] == expected[:3]
    assert tokens[3] != expected[3] and tokens[5] != expected[5]
    assert stats["promotions"] > 2
    if temperature == 0:
        losses = margins_of(plain, prompts, tokens)
        for text, kappa in zip(losses[3:], [0.05, 0.4, 0.05], strict=True):
            assert min(text) >= math.log(kappa) - 1e-4


def test_a_looser_margin(make_llm: Callable[..., Any], tiny_head: Path, plain: Any, prompts: list) -> None:
    """A strict server that allows it promotes for the request that asks, and for no other."""
    llm = make_llm(speculative_config=adaptivespec(tiny_head, requests={"looser_margin": True}))
    params = [overriding(margin=0.05), *[greedy(TOKENS)] * 5]
    expected = generate(plain, prompts, greedy(TOKENS))
    tokens, stats = decode_second_choices(llm, plain, prompts, params)
    assert stats["promotions"] > 0
    assert tokens[0] != expected[0] and tokens[1:] == expected[1:]
    assert min(margins_of(plain, prompts, tokens)[0]) >= math.log(0.05) - 1e-4


def test_refused_before_the_engine_sees_them(make_llm: Callable[..., Any], tiny_head: Path, trees: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    prompt = random_prompts(1, seed=122)
    for bad, named in ((overriding(margin=0.5), "adaptivespec_margin"), (overriding(width=3), "adaptivespec_width")):
        with pytest.raises(VLLMValidationError, match=named):
            trees.generate(prompt, bad, use_tqdm=False)
    off = make_llm(speculative_config=adaptivespec(tiny_head, requests={"overrides": False}))
    with pytest.raises(VLLMValidationError, match=r"requests\.overrides switched off"):
        off.generate(prompt, overriding(max_nodes=0), use_tqdm=False)
    assert len(generate(off, prompt, greedy(4, extra_args={"mine": 1}))[0]) == 4


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_of_promoted_tokens(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, prompts: list, mode: str, temperature: float
) -> None:
    """The target's own value of each emitted token, after the text that was really emitted before it."""
    llm = make_llm(speculative_config=adaptivespec(tiny_head, margin={"kappa": 0.02}), logprobs_mode=mode)
    drafts = Oracle(runner_of(llm), truth_of(prompts, second_choices(plain, prompts)))
    llm.collective_rpc("adaptivespec_stats")
    try:
        outputs = llm.generate(prompts, greedy(TOKENS, logprobs=2, temperature=temperature, seed=3), use_tqdm=False)
    finally:
        drafts.remove()
    assert llm.collective_rpc("adaptivespec_stats")[0]["promotions"] > 5
    texts = [
        {"prompt_token_ids": prompt["prompt_token_ids"] + list(output.outputs[0].token_ids)}
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    scored = plain.generate(texts, greedy(1, prompt_logprobs=20), use_tqdm=False)
    for prompt, output, score in zip(prompts, outputs, scored, strict=True):
        entries = score.prompt_logprobs[len(prompt["prompt_token_ids"]) :]
        for token, ours, theirs in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, entries, strict=True):
            if mode == "raw_logprobs" or temperature == 0:
                assert all(ours[t].logprob == pytest.approx(theirs[t].logprob, abs=1e-4) for t in ours)
            else:  # tempered: differences of log-probabilities are those of the raw ones over the temperature
                best = max(ours, key=lambda t: ours[t].logprob)
                ratio = (theirs[token].logprob - theirs[best].logprob) / temperature
                assert ours[token].logprob - ours[best].logprob == pytest.approx(ratio, abs=1e-3)
