"""Rules of other methods on the real engine: what it decided, recomputed from the logits it decided on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptivespec_vllm.engine.v1 import cpu_runner
from adaptivespec_vllm.engine.v2 import sampler as v2_sampler
from adaptivespec_vllm.types import DraftTree, TreeShape
from tests.e2e.conftest import ON_V2, adaptivespec, generate, greedy, random_prompts
from tests.e2e.oracle import Oracle, runner_of
from tests.reference import rules as reference
from tests.reference.lookahead import most_worth

TOKENS = 32
CHAIN = {"policy": "static", "shape": {"depth": 6, "width": 1, "nodes": 6}}
WINDOW = 2
KAPPA = 0.05
RULES: dict[str, tuple[dict[str, Any], reference.Acceptable, int, dict[str, Any]]] = {
    "mars": ({}, reference.mars(0.9), 0, {}),
    "typical": ({}, reference.typical(0.09, 0.3), 0, {}),
    "fly": ({"window": WINDOW}, reference.fly(0.3), WINDOW, {"tree": CHAIN}),
}


@pytest.fixture(scope="module")
def prompts() -> list:
    return random_prompts(5, seed=51)


@pytest.fixture(scope="module")
def strict(plain: Any, prompts: list) -> list[list[int]]:
    return generate(plain, prompts, greedy(TOKENS))


@pytest.fixture(scope="module")
def engine(make_llm: Callable[..., Any], tiny_head: Path) -> Callable[[str], Any]:
    engines: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in engines:
            parameters, *_, more = RULES[name]
            options = adaptivespec(tiny_head, rule={"name": name, **parameters}, **more)
            engines[name] = make_llm(speculative_config=options)
        return engines[name]

    return of


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    """The target itself, outside of vLLM, to know what it will choose before it is asked."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_target).eval()


class RankedOracle(Oracle):
    """Drafts the target's first, second or third choice, each in the context of those before it.

    Args:
        model: the target.
        width: children of each node; the first of them goes on.
        mistakes: how often the node that goes on is not the first choice.

    """

    def __init__(self, runner: Any, model: Any, width: int, mistakes: float) -> None:
        super().__init__(runner, {})
        self._model = model
        self._width, self._mistakes = width, mistakes

    def bound(self) -> TreeShape:
        return TreeShape(6, self._width, 6 * self._width)

    @torch.inference_mode()
    def tree(self, text: list[int], prompt: int, bound: TreeShape) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        at = 0
        for _ in range(min(bound.depth, bound.nodes // self._width)):
            best = self._model(torch.tensor([text])).logits[0, -1].topk(3).indices.tolist()
            ranks = [0, 1, 2] if self._random.random() > self._mistakes else self._random.choice([[1, 2, 0], [2, 1, 0]])
            children = [best[rank] for rank in ranks[: self._width]]
            tokens += children
            parents += [at] * len(children)
            at = len(tokens) - len(children) + 1
            text = [*text, children[0]]
        return DraftTree(tokens, parents, 0, confidence=0.5, shape=bound)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Logits, trees, protected tokens (None: strict) and results of every fused verification while it lasts."""
    steps: list[tuple[Any, ...]] = []
    module, name = (v2_sampler, "walk") if ON_V2 else (cpu_runner, "verify_greedy")
    original = getattr(module, name)

    def verify(logits: Any, trees: Any, margins: Any, *rest: Any) -> Any:
        result = original(logits, trees, margins, *rest)
        protected = [None if m is None else set(m.protected) for m in margins] if not ON_V2 else of_tensors(margins)
        steps.append((logits.clone(), trees, protected, result))
        return result

    def of_tensors(margins: Any) -> list[set[int] | None]:
        columns = zip(margins.max_log_ratio.tolist(), margins.protected.tolist(), strict=True)
        return [None if ratio < 0 else {*tokens} - {-1} for ratio, tokens in columns]

    with monkeypatch.context() as patch:
        patch.setattr(module, name, verify)
        yield steps


@pytest.fixture(scope="module")
def decode(engine: Any, model: Any, prompts: list) -> Callable[..., tuple[Any, Any]]:
    def run(name: str, params: Any, llm: Any = None) -> tuple[Any, Any]:
        """Answers with such drafts, and the worker's statistics of them."""
        llm = llm or engine(name)
        width, mistakes = (1, 0.25) if name == "fly" else (2, 0.5)
        drafts = RankedOracle(runner_of(llm), model, width, mistakes)
        llm.collective_rpc("adaptivespec_stats")
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        finally:
            drafts.remove()
        return [output.outputs[0] for output in outputs], llm.collective_rpc("adaptivespec_stats")[0]

    return run


def ids(answers: Any) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers]


@pytest.mark.parametrize("name", RULES)
def test_every_decision_is_that_of_the_definition(
    decode: Any, name: str, strict: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, acceptable, window, _ = RULES[name]
    with recorded(monkeypatch) as steps:
        answers, stats = decode(name, greedy(TOKENS))
    assert ids(answers) != strict
    assert stats["promotions"] > 5
    promotions, regret, refused = 0, 0.0, 0
    for logits, trees, protected, result in steps:
        starts = trees.start.tolist()
        for b, (first, last) in enumerate(pairwise(starts)):
            parents, tokens = trees.parents[first:last].tolist(), trees.tokens[first:last].tolist()
            rows = logits[first:last].tolist()
            tokens = [token for token in tokens if token >= 0]  # rows behind a tree's last node hold none
            parents = parents[: len(tokens)]
            if protected[b] is None:
                expected = reference.walk(lambda z, x: False, 0, parents, tokens, rows)
            else:
                expected = reference.walk(acceptable, window, parents, tokens, rows, frozenset(protected[b]))
            assert result.paths[b, : int(result.lengths[b])].tolist() == expected.path
            assert int(result.next_tokens[b]) == expected.next_token
            assert int(result.promotions[b]) == expected.promotions
            promotions += expected.promotions
            regret += expected.regret
            at = expected.path[-1] if expected.path else 0
            refused += at in parents  # a node with children where the walk stopped: they were not good enough
    assert stats["promotions"] == promotions
    assert stats["regret"] == pytest.approx(regret, rel=1e-4)
    assert refused > 1


def test_a_margin_that_looks_ahead_takes_the_best_path(
    decode: Any, make_llm: Callable[..., Any], tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all paths of each tree, by the logits it was decided on; the published rule takes others."""
    options = adaptivespec(tiny_head, margin={"kappa": KAPPA})
    llm = make_llm(speculative_config=options)
    with recorded(monkeypatch) as steps:
        answers, stats = decode("margin", greedy(TOKENS), llm)
    promotions, short, limit = 0, 0, -math.log(KAPPA)
    for logits, trees, protected, result in steps:
        for b, (first, last) in enumerate(pairwise(trees.start.tolist())):
            if protected[b] is None:
                continue
            parents, tokens = trees.parents[first:last].tolist(), trees.tokens[first:last].tolist()
            best = most_worth(logits[first:last].tolist(), parents, tokens, limit, frozenset(protected[b]))
            length, regret = int(result.lengths[b]), float(result.regrets[b])
            assert length - 2 * regret / limit == pytest.approx(best, abs=1e-3)
            promotions += int(result.promotions[b])
            short += length < max(trees.depths[first:last].tolist())
    assert promotions == stats["promotions"] > 5 < short
    published = make_llm(speculative_config=adaptivespec(tiny_head, margin={"kappa": KAPPA, "lookahead": False}))
    assert ids(decode("margin", greedy(TOKENS), published)[0]) != ids(answers)


@pytest.mark.parametrize("name", RULES)
def test_the_stepwise_walk_decides_the_same(decode: Any, name: str) -> None:
    """A bias of 0 changes no logit and keeps the batch from the fused walk."""
    fused, fused_stats = decode(name, greedy(TOKENS))
    stepwise, stats = decode(name, greedy(TOKENS, logit_bias={5: 0.0}))
    assert ids(stepwise) == ids(fused)
    assert stats["promotions"] == fused_stats["promotions"] > 0
    assert stats["regret"] == pytest.approx(fused_stats["regret"], rel=1e-4)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_strict_request_decodes_as_without_the_rule(
    decode: Any, plain: Any, name: str, temperature: float, prompts: list
) -> None:
    params = greedy(TOKENS, temperature=temperature, seed=7)
    expected = generate(plain, prompts, params)
    lossy, _ = decode(name, params)
    assert ids(lossy) != expected
    params.extra_args = {"adaptivespec_margin": 0}
    answers, stats = decode(name, params)
    assert ids(answers) == expected
    assert stats["promotions"] == 0


@pytest.mark.parametrize("name", ["mars", "typical"])
def test_a_request_that_asks_for_another_kappa_is_refused(engine: Any, name: str, prompts: list) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=r"adaptivespec_margin.*has no kappa"):
        generate(engine(name), prompts[:1], greedy(4, extra_args={"adaptivespec_margin": 0.5}))


def test_windows_that_fail_leave_log_probabilities_in_place(decode: Any, plain: Any, prompts: list) -> None:
    """A look-ahead that is taken back has drawn further than what is emitted."""
    answers, _ = decode("fly", greedy(TOKENS, logprobs=1, logit_bias={5: 0.0}))
    texts = [
        {"prompt_token_ids": p["prompt_token_ids"] + list(a.token_ids)} for p, a in zip(prompts, answers, strict=True)
    ]
    outputs = plain.generate(texts, greedy(1, prompt_logprobs=1), use_tqdm=False)
    for answer, again, prompt in zip(answers, outputs, prompts, strict=True):
        scored = again.prompt_logprobs[len(prompt["prompt_token_ids"]) :]
        assert len(answer.logprobs) == len(answer.token_ids) == TOKENS
        for token, mine, plains in zip(answer.token_ids, answer.logprobs, scored, strict=True):
            assert mine[token].logprob == pytest.approx(plains[token].logprob, abs=1e-3)


def test_caps_and_guards_are_those_of_the_margin(
    make_llm: Callable[..., Any], tiny_head: Path, prompts: list, decode: Any
) -> None:
    rule = {"name": "typical", "max_promotions_per_step": 1}
    llm = make_llm(speculative_config=adaptivespec(tiny_head, rule=rule, guard={"max_regret": 1.5}))
    _, stats = decode("typical", greedy(TOKENS), llm)
    assert 0 < stats["promotions"] <= stats["steps"]
    assert stats["regret"] <= 1.5 * len(prompts) + 1e-3


def test_a_rule_is_warned_about_at_start(
    make_llm: Callable[..., Any], tiny_head: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    make_llm(speculative_config=adaptivespec(tiny_head, rule={"name": "mars"}))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("verification is lossy: the target's second choice is accepted" in message for message in said)
