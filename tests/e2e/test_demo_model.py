"""The demo's model and head: real drafts, real text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.config import resolve
from adaptivespec_vllm.demo.model import DemoModel, prepare
from adaptivespec_vllm.engine.v1.costs import measured_costs
from adaptivespec_vllm.runtime import cache_dir
from tests.e2e.oracle import runner_of

DATA = Path(__file__).parent / "data" / "prompts.jsonl"
TOKENS = 48


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    return prepare(cache_dir(), lambda message: None)


CAP = 48


@pytest.fixture(scope="module")
def engine(make_llm: Callable[..., Any], demo: DemoModel) -> Callable[..., Any]:
    from vllm.config import ReasoningConfig

    def make(speculative_config: dict[str, Any] | None = None) -> Any:
        return make_llm(
            demo.model,
            skip_tokenizer_init=False,
            max_model_len=512,
            block_size=128,
            kv_cache_memory_bytes=160 << 20,
            speculative_config=speculative_config and {"model": str(demo.head), **speculative_config},
            # Without effect on requests that have no thinking budget.
            reasoning_config=ReasoningConfig(reasoning_start_str="Let me think", reasoning_end_str="Answer:"),
        )

    return make


@pytest.fixture(scope="module")
def plain(engine: Callable[..., Any]) -> Any:
    return engine()


@pytest.fixture(scope="module")
def our_engine(engine: Callable[..., Any]) -> Any:
    """One engine for all settings of ours: an engine of its own for each would cost a gigabyte."""
    # Started with a policy that asks for no costs: measured ones would draft otherwise on every machine, and the
    # cost-aware policy takes its stand-in for them.
    return engine({"method": "adaptivespec", "num_speculative_tokens": CAP, "tree": static(2, 1, 2)})


@pytest.fixture
def ours(our_engine: Any) -> Callable[..., Any]:
    """The engine with the settings given, its counters at zero."""

    def configured(**sections: Any) -> Any:
        runner_of(our_engine).configure(resolve({"num_speculative_tokens": CAP} | sections))
        our_engine.reset_prefix_cache()
        our_engine.collective_rpc("adaptivespec_stats")
        return our_engine

    return configured


@pytest.fixture(scope="module")
def prompts(plain: Any) -> list[dict[str, list[int]]]:
    """Two prompts of each kind of text."""
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    tokenizer = plain.get_tokenizer()
    chosen = [row for kind in ("math", "code", "chat") for row in [r for r in rows if r["kind"] == kind][:2]]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        for row in chosen
    ]
    return [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts]


def params(**overrides: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 0, "max_tokens": TOKENS} | overrides))


def decode(llm: Any, prompts: list, sampling: Any = None) -> list[list[int]]:
    outputs = llm.generate(prompts, sampling or params(), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(plain: Any, prompts: list) -> list[list[int]]:
    return decode(plain, prompts)


def static(depth: int, width: int, nodes: int, **overrides: Any) -> dict[str, Any]:
    """The section of a static tree."""
    return {"policy": "static", "shape": {"depth": depth, "width": width, "nodes": nodes}} | overrides


def assert_same(plain: Any, prompts: list, got: list[list[int]], want: list[list[int]]) -> None:
    """Equal, or different from a near-tie of the target on (less than 1e-4 nats)."""
    for prompt, ours, theirs in zip(prompts, got, want, strict=True):
        if ours == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        text = {"prompt_token_ids": prompt["prompt_token_ids"] + theirs[:at]}
        entries = plain.generate([text], params(max_tokens=1, logprobs=5), use_tqdm=False)[0].outputs[0].logprobs[0]
        assert ours[at] in entries and abs(entries[ours[at]].logprob - entries[theirs[at]].logprob) < 1e-4


def drafted_and_accepted(llm: Any) -> list[tuple[int, int]]:
    """Fills with (drafted, accepted) of every verified list, as the scheduler counts them."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    seen: list[tuple[int, int]] = []
    stock = scheduler.make_spec_decoding_stats

    def record(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any) -> Any:
        seen.append((num_draft_tokens, num_accepted_tokens))
        return stock(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    scheduler.make_spec_decoding_stats = record
    return seen


@pytest.mark.parametrize("length", [1, 3])
def test_width_one_is_stock_eagle3(
    engine: Callable[..., Any], ours: Callable[..., Any], plain: Any, prompts: list, expected: list, length: int
) -> None:
    """The same tokens, and the same drafts accepted at the same steps."""
    stock = engine({"method": "eagle3", "num_speculative_tokens": length})
    chain = ours(tree=static(length, 1, length))
    theirs, mine = drafted_and_accepted(stock), drafted_and_accepted(chain)
    want = [decode(stock, [prompt])[0] for prompt in prompts]
    got = [decode(chain, [prompt])[0] for prompt in prompts]
    assert got == want
    assert_same(plain, prompts, got, expected)
    assert mine == theirs
    assert sum(accepted for _, accepted in mine) > 20


def test_adaptive(ours: Callable[..., Any], plain: Any, prompts: list, expected: list) -> None:
    """One at a time and all at once."""
    adaptive = ours()
    assert_same(plain, prompts, [decode(adaptive, [prompt])[0] for prompt in prompts], expected)
    assert_same(plain, prompts, decode(adaptive, prompts), expected)
    stats = adaptive.collective_rpc("adaptivespec_stats")[0]
    assert stats["emitted"] / stats["steps"] > 1.2
    assert not stats["chains"]


def test_measured_costs_are_those_of_a_large_target_and_a_small_head(ours: Callable[..., Any]) -> None:
    """Thirty layers against one. The tiny model's passes are mostly what vLLM does around them, so not there."""
    costs = measured_costs(runner_of(ours(tree=static(8, 4, 24))))
    assert costs.first(1) < costs.target(1)
    assert costs.level(1) < costs.target(1)


def test_siblings_pay(ours: Callable[..., Any], plain: Any, prompts: list, expected: list) -> None:
    """A chain, the same with one more node at the root, and a large tree: each accepts at least what the last did."""
    lengths = []
    for shape in ((2, 1, 2), (2, 2, 3), (8, 8, 48)):
        llm = ours(tree=static(*shape))
        assert_same(plain, prompts, decode(llm, prompts), expected)
        stats = llm.collective_rpc("adaptivespec_stats")[0]
        lengths.append(stats["emitted"] / stats["steps"])
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[0] + 0.2


def test_equal_end_shapes_are_static(ours: Callable[..., Any], prompts: list) -> None:
    shape = {"depth": 4, "width": 3, "nodes": 6}
    seen = []
    for tree in (static(4, 3, 6, min_path_probability=0.05), {"low": shape, "high": shape}):
        llm = ours(tree=tree)
        tokens = decode(llm, prompts)
        stats = llm.collective_rpc("adaptivespec_stats")[0]
        counted = ("steps", "emitted", "accepted", "drafted_nodes", "drafted_depth")
        seen.append((tokens, [stats[key] for key in counted]))
    assert seen[0] == seen[1]


def test_margin_accepts_more_and_keeps_its_bound(ours: Callable[..., Any], plain: Any, prompts: list) -> None:
    """At the same shape the margin rule accepts more; every token has 0.2 of the probability of the target's choice."""
    lengths = []
    for sections in ({}, {"margin": {"kappa": 0.2}}):
        llm = ours(tree=static(5, 4, 8), **sections)
        tokens = decode(llm, prompts)
        stats = llm.collective_rpc("adaptivespec_stats")[0]
        lengths.append(stats["emitted"] / stats["steps"])
    assert lengths[1] > lengths[0]
    assert stats["promotions"] > 0
    for prompt, text in zip(prompts, tokens, strict=True):
        ids = prompt["prompt_token_ids"]
        replayed = {"prompt_token_ids": ids + text}
        output = plain.generate([replayed], params(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
        for token, entries in zip(text, output[0].prompt_logprobs[len(ids) :], strict=True):
            best = max(entry.logprob for entry in entries.values())
            assert entries[token].logprob - best >= -1.6095


def test_structured_output(ours: Callable[..., Any], plain: Any) -> None:
    """A grammar holds, with the text of plain decoding."""
    from vllm.sampling_params import StructuredOutputsParams

    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "blue"]}, "count": {"type": "integer"}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    adaptive = ours()
    chat = [{"role": "user", "content": "Name a colour and a count as JSON."}]
    for constraint in ({"json": schema}, {"choice": ["yes", "no, never"]}, {"regex": r"[a-f]{4}-\d{3}"}):
        sampling = params(structured_outputs=StructuredOutputsParams(**constraint), max_tokens=40)
        want = plain.chat(chat, sampling, use_tqdm=False)[0].outputs[0]
        got = adaptive.chat(chat, sampling, use_tqdm=False)[0].outputs[0]
        assert got.text == want.text
        assert list(got.token_ids) == list(want.token_ids)
    text = adaptive.chat(chat, params(structured_outputs=StructuredOutputsParams(json=schema)), use_tqdm=False)[0]
    assert json.loads(text.outputs[0].text)["colour"] in ("red", "green", "blue")


def test_bad_words_and_stop_strings(ours: Callable[..., Any], plain: Any) -> None:
    adaptive = ours()
    chat = [{"role": "user", "content": "Count from one to ten in words."}]
    for sampling in (
        params(bad_words=["two", "three"]),
        params(stop=["four"]),
        params(stop=["five"], include_stop_str_in_output=True),
    ):
        want = plain.chat(chat, sampling, use_tqdm=False)[0].outputs[0]
        got = adaptive.chat(chat, sampling, use_tqdm=False)[0].outputs[0]
        assert (got.text, list(got.token_ids), got.finish_reason) == (
            want.text,
            list(want.token_ids),
            want.finish_reason,
        )


def test_thinking_budget(ours: Callable[..., Any], plain: Any) -> None:
    """A budget follows drafts in the order of a text: the whole batch gets chains, and the text of plain decoding."""
    chat = [{"role": "user", "content": "How many legs have two cats and a bird?"}]
    params_of = [params(thinking_token_budget=6), params()]
    tokenizer = plain.get_tokenizer()
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + "Let me think"
    prompt = {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
    texts = [
        [output.outputs[0].text for output in llm.generate([prompt, prompt], params_of, use_tqdm=False)]
        for llm in (plain, ours())
    ]
    assert "Answer:" in texts[0][0], "the budget did nothing: nothing was tested"
    assert texts[0] == texts[1]
