"""Grammars on trees: the text of plain decoding, masks along each node's own path, nothing forbidden accepted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import adaptivespec, random_prompts, truth_of
from tests.e2e.oracle import hiding

TOKENS = 48
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,9}$"},
        "count": {"enum": [0, 7, 42, 365]},
        "kind": {"enum": ["aa", "bb", "abc"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
PATTERN = r"[a-z]{4,20}-[0-9]{2,6}(, [a-z]{1,6}){1,4}"
CHOICES = ["alpha beta gamma", "alpha beta delta", "omega"]
GRAMMARS = {
    "xgrammar": 'root ::= "[" item ("," item){2,4} "]"\nitem ::= [a-z]{1,6} | [0-9]{1,3}\n',
    "guidance": 'start: "[" item ("," item){2,4} "]"\nitem: /[a-z]{1,6}/ | /[0-9]{1,3}/\n',
}
LETTERS = range(67, 512)
"""Token ids of small letters and pairs of them (``tiny.add_tokenizer``): often allowed, so trees stay trees."""

KINDS = ["json", "regex", "choice", "grammar"]


def constraint(kind: str, backend: str) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if kind == "grammar" and backend not in GRAMMARS:
        kind = "regex"  # outlines takes no grammars
    given: dict[str, Any] = {"json": SCHEMA, "regex": PATTERN, "choice": CHOICES, "grammar": GRAMMARS.get(backend)}
    return StructuredOutputsParams(**{kind: given[kind]})


def skip_what_a_backend_lacks(backend: str, kind: str) -> None:
    if kind == "grammar" and backend not in GRAMMARS:
        pytest.skip(f"{backend} takes no grammars")


def parameters(kind: str, backend: str, **sampling: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        **({"temperature": 0, "max_tokens": TOKENS, "structured_outputs": constraint(kind, backend)} | sampling)
    )


def is_valid(kind: str, text: str) -> bool:
    """Whether a finished text obeys its constraint, by other means than a grammar."""
    if kind == "json":
        value = json.loads(text)
        return (
            value.keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
            and re.fullmatch("[a-z]{2,9}", value["name"]) is not None
            and value["count"] in (0, 7, 42, 365)
            and value["kind"] in ("aa", "bb", "abc")
        )
    if kind == "choice":
        return text in CHOICES
    pattern = PATTERN if kind == "regex" else r"\[([a-z]{1,6}|[0-9]{1,3})(,([a-z]{1,6}|[0-9]{1,3})){2,4}\]"
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module", params=["xgrammar", "guidance", "outlines"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def make(make_llm: Callable[..., Any], tiny_speaker: Path, backend: str) -> Callable[..., Any]:
    structured = {"backend": backend, "disable_any_whitespace": backend != "outlines"}
    return lambda **settings: make_llm(
        tiny_speaker, skip_tokenizer_init=False, structured_outputs_config=structured, **settings
    )


@pytest.fixture(scope="module")
def plain_speaker(make: Callable[..., Any]) -> Any:
    return make()


@pytest.fixture(scope="module")
def tree_speaker(make: Callable[..., Any], tiny_head: Path) -> Any:
    return make(speculative_config=adaptivespec(tiny_head))


def decode(llm: Any, prompts: list, truth: dict, params: Any, **oracle: Any) -> tuple[list[Any], dict[str, Any]]:
    """Decode with hidden truths; what came out, and the worker's statistics."""
    with hiding(llm, truth, **oracle) as stats:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return outputs, stats


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.2}], ids=["greedy", "seeded", "penalty"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_plain_decoding(
    plain_speaker: Any, tree_speaker: Any, backend: str, kind: str, sampling: dict[str, Any]
) -> None:
    skip_what_a_backend_lacks(backend, kind)
    prompts = random_prompts(4, seed=91)
    params = parameters(kind, backend, **sampling)
    expected = [output.outputs[0] for output in plain_speaker.generate(prompts, params, use_tqdm=False)]
    # the truth goes on past the end: the grammar has to end the text
    truth = truth_of(prompts, [tokens + [5] * TOKENS for tokens in tokens_of(expected)])
    outputs, stats = decode(tree_speaker, prompts, truth, params, wrong=LETTERS)
    assert tokens_of(outputs) == tokens_of(expected)
    assert [(o.text, o.finish_reason) for o in outputs] == [(o.text, o.finish_reason) for o in expected]
    assert all(is_valid(kind, output.text) for output in outputs if output.finish_reason == "stop")
    assert stats["accepted"] > 8
    if kind in ("regex", "grammar"):  # they allow siblings: a tree, not a chain
        assert stats["drafted_nodes"] > 1.2 * stats["drafted_depth"]
    assert not stats["chains"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_forbidden_is_promoted(
    make: Callable[..., Any], tiny_head: Path, plain_speaker: Any, backend: str, kind: str
) -> None:
    """At a tiny kappa every draft that the grammar allows may pass, at every depth of a tree, and no other."""
    skip_what_a_backend_lacks(backend, kind)
    llm = make(speculative_config=adaptivespec(tiny_head, margin={"kappa": 1e-30}))
    prompts = random_prompts(6, seed=92)
    params = parameters(kind, backend)
    expected = [output.outputs[0] for output in plain_speaker.generate(prompts, params, use_tqdm=False)]
    truth = truth_of(prompts, [tokens + [5] * 8 * TOKENS for tokens in tokens_of(expected)])
    outputs, stats = decode(llm, prompts, truth, parameters(kind, backend, max_tokens=4 * TOKENS), wrong=LETTERS)
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert all(is_valid(kind, output.text) for output in outputs)
    if kind in ("regex", "grammar"):
        assert stats["promotions"] > 10


def test_beside_requests_without_a_grammar(plain_speaker: Any, tree_speaker: Any, backend: str) -> None:
    """Masks reach their own requests only, whatever the order and the size of the trees."""
    from vllm import SamplingParams

    prompts = random_prompts(8, seed=93)
    free = SamplingParams(temperature=0, max_tokens=TOKENS)
    params = [parameters(KINDS[i // 2], backend) if i % 2 else free for i in range(8)]
    expected = [output.outputs[0] for output in plain_speaker.generate(prompts, params, use_tqdm=False)]
    outputs, stats = decode(tree_speaker, prompts, truth_of(prompts, tokens_of(expected)), params)
    assert tokens_of(outputs) == tokens_of(expected)
    assert stats["accepted"] > 50


def test_logprobs_and_least_length(plain_speaker: Any, tree_speaker: Any, backend: str) -> None:
    """Log-probabilities of masked rows; stop tokens are banned although the grammar would end."""
    prompts = random_prompts(4, seed=94)
    params = parameters("regex", backend, logprobs=2, min_tokens=20)
    expected = [output.outputs[0] for output in plain_speaker.generate(prompts, params, use_tqdm=False)]
    outputs, stats = decode(tree_speaker, prompts, truth_of(prompts, tokens_of(expected)), params)
    assert tokens_of(outputs) == tokens_of(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a.keys() == b.keys()
            assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in a)
    assert stats["accepted"] > 8


def test_cut_lists(make: Callable[..., Any], tiny_head: Path, plain_speaker: Any, backend: str) -> None:
    """The scheduler cuts lists where tokens are scarce: a part of a pruned tree is still a tree."""
    llm = make(speculative_config=adaptivespec(tiny_head), max_num_batched_tokens=32, enable_chunked_prefill=True)
    prompts = random_prompts(8, seed=95)
    params = parameters("regex", backend)
    expected = [output.outputs[0] for output in plain_speaker.generate(prompts, params, use_tqdm=False)]
    outputs, stats = decode(llm, prompts, truth_of(prompts, tokens_of(expected)), params)
    assert tokens_of(outputs) == tokens_of(expected)
    assert stats["accepted"] > 30
