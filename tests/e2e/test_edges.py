"""Cases that broke other speculative decoders, tried on this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import tiny
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, scaled, truth_of
from tests.e2e.oracle import Oracle, decode_with_oracle, runner_of

TOKENS = scaled(40)


@pytest.fixture(scope="module")
def prompts() -> list:
    return random_prompts(8, seed=61)


@pytest.fixture(scope="module")
def expected(plain: Any, prompts: list) -> list[list[int]]:
    return generate(plain, prompts, greedy(TOKENS))


@pytest.mark.parametrize("batch", [1, 8])
def test_wide_trees_with_long_answers(make_llm: Callable[..., Any], tiny_head: Path, plain: Any, batch: int) -> None:
    """Width 10, 32 nodes: accepted nodes are scattered over the tree; the largest tree there is: 63 nodes."""
    prompts = random_prompts(batch, seed=62)
    expected = generate(plain, prompts, greedy(160))
    for nodes in (32, 63):
        shape = {"depth": 6, "width": 10, "nodes": nodes}
        llm = make_llm(speculative_config=adaptivespec(tiny_head, tree={"policy": "static", "shape": shape}))
        tokens, stats = decode_with_oracle(
            llm, prompts, truth_of(prompts, expected), greedy(160), max_nodes=nodes, max_depth=10
        )
        assert tokens == expected
        assert stats["accepted"] > 10 * batch


@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 1, 1), (2, 2, 3), (12, 1, 12)])
def test_odd_shapes(make_llm: Callable[..., Any], tiny_head: Path, prompts: list, expected: list, shape: tuple) -> None:
    """Depth 1 among them, with the head's own drafts."""
    depth, width, nodes = shape
    tree = {"policy": "static", "shape": {"depth": depth, "width": width, "nodes": nodes}}
    llm = make_llm(speculative_config=adaptivespec(tiny_head, tree=tree))
    llm.collective_rpc("adaptivespec_stats")
    assert generate(llm, prompts, greedy(TOKENS)) == expected
    stats = llm.collective_rpc("adaptivespec_stats")[0]
    assert stats["drafted_depth"] > 0


@pytest.mark.parametrize("block_size", [32, 96, 128, 256])
def test_block_sizes(
    make_llm: Callable[..., Any], tiny_head: Path, prompts: list, expected: list, block_size: int
) -> None:
    llm = make_llm(speculative_config=adaptivespec(tiny_head), block_size=block_size)
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, expected), greedy(TOKENS))
    assert tokens == expected
    assert stats["accepted"] > 50


@pytest.mark.parametrize("keep", [False, True])
def test_prefix_cache_hits(make_llm: Callable[..., Any], tiny_head: Path, plain: Any, keep: bool) -> None:
    """vLLM lets the head see the last cached block anew: a block less is hit, unless it is told not to."""
    llm = make_llm(speculative_config=adaptivespec(tiny_head, disable_eagle_block_drop=keep))
    prompts = random_prompts(3, seed=72, shortest=100, longest=120)
    hits = []
    for engine in (plain, llm):
        engine.reset_prefix_cache()
        first = generate(engine, prompts, greedy(TOKENS))
        outputs = engine.generate(prompts, greedy(TOKENS), use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == first
        hits.append([output.num_cached_tokens for output in outputs])
    assert hits[0] == [96] * 3
    assert hits[1] == [96 if keep else 64] * 3


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_prompts_beyond_the_heads_window(
    make_llm: Callable[..., Any], tmp_path: Path, plain: Any, enforce_eager: bool
) -> None:
    """A head that knows 64 positions behind a target that knows 256: no crash, right text, drafts where they fit."""
    head = tiny.make_head(tmp_path / "head", max_len=64)
    llm = make_llm(speculative_config=adaptivespec(head), enforce_eager=enforce_eager)
    for length in (20, 63, 64, 65, 66, 200):
        prompts = random_prompts(3, seed=length, shortest=length, longest=length)
        expected = generate(plain, prompts, greedy(60))
        tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, expected), greedy(60))
        assert tokens == expected
        assert bool(stats["drafted_nodes"]) == (length <= 64)
        assert generate(llm, prompts, greedy(60)) == expected
    mixed = random_prompts(4, seed=63, shortest=10, longest=20) + random_prompts(4, seed=64, shortest=150, longest=180)
    expected = generate(plain, mixed, greedy(60))
    tokens, stats = decode_with_oracle(llm, mixed, truth_of(mixed, expected), greedy(60))
    assert tokens == expected
    assert stats["accepted"] > 0, "one long request must not turn drafting off for the others"


def test_finish_at_max_model_len(trees: Any) -> None:
    prompts = random_prompts(4, seed=65, shortest=100, longest=240)
    outputs = trees.generate(prompts, greedy(1000), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].finish_reason == "length"
        assert len(prompt["prompt_token_ids"]) + len(output.outputs[0].token_ids) == 256


def test_batch_size_changes_while_shapes_change(make_llm: Callable[..., Any], tiny_head: Path, plain: Any) -> None:
    """Requests of very different lengths come and go while every request changes its shape."""
    prompts = random_prompts(24, seed=66)
    params = [greedy(3 + 5 * (i % 9)) for i in range(len(prompts))]
    expected = generate(plain, prompts, params)
    llm = make_llm(speculative_config={"method": "adaptivespec", "model": str(tiny_head)})
    assert generate(llm, prompts, params) == expected
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, expected), params, max_nodes=7)
    assert tokens == expected
    assert stats["accepted"] > 50


def test_one_token_request_joins_a_running_batch(make_llm: Callable[..., Any], tiny_head: Path, plain: Any) -> None:
    """vLLM pads such a request with placeholders (-1): they reach neither the model nor the text."""
    llm = make_llm(speculative_config=adaptivespec(tiny_head, margin={"kappa": 1e-9}))
    runner = runner_of(llm)
    placeholders = []
    stock = runner._prepare_inputs

    def watch(scheduler_output: Any, scheduled: Any) -> Any:
        prepared = stock(scheduler_output, scheduled)
        placeholders.extend(
            t for drafts in scheduler_output.scheduled_spec_decode_tokens.values() for t in drafts if t < 0
        )
        return prepared

    stock_forward = runner._model_forward

    def check(*args: Any, **kwargs: Any) -> Any:
        assert int(kwargs["input_ids"].min()) >= 0
        return stock_forward(*args, **kwargs)

    runner._prepare_inputs, runner._model_forward = watch, check
    running = random_prompts(3, seed=67)
    joining = [{"prompt_token_ids": [9]}, {"prompt_token_ids": [11]}]
    engine = llm.llm_engine
    for i, prompt in enumerate(running):
        engine.add_request(f"r{i}", prompt, greedy(30))
    finished = {}
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
        if step in (3, 6):
            engine.add_request(f"j{step}", joining[step // 6], greedy(30))
    assert placeholders, "nothing was padded: nothing was tested"
    assert len(finished) == 5 and all(len(t) == 30 for t in finished.values())
    # kappa is tiny, so running requests promote what they like; a padded request verifies strictly.
    alone = generate(plain, joining, greedy(1))
    assert [finished["j3"][:1], finished["j6"][:1]] == alone


def test_priority_preemption(make_llm: Callable[..., Any], tiny_head: Path, plain: Any) -> None:
    """Urgent requests push others out in the middle of their trees; all texts stay those of plain decoding."""
    prompts = random_prompts(8, seed=68, shortest=40, longest=60)
    expected = generate(plain, prompts, greedy(80))
    llm = make_llm(
        speculative_config=adaptivespec(tiny_head),
        scheduling_policy="priority",
        num_gpu_blocks_override=16,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    stock = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return stock(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    drafts = Oracle(runner_of(llm), truth_of(prompts, expected))
    engine = llm.llm_engine
    finished: dict[str, list[int]] = {}
    try:
        for i, prompt in enumerate(prompts[:4]):
            engine.add_request(str(i), prompt, greedy(80), priority=10)
        for step in range(10_000):
            if step == 5:
                for i, prompt in enumerate(prompts[4:], start=4):
                    engine.add_request(str(i), prompt, greedy(80), priority=0)
            if not engine.has_unfinished_requests():
                break
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
    finally:
        drafts.remove()
    assert preempted
    assert [finished[str(i)] for i in range(8)] == expected


def test_abort_in_the_middle(trees: Any, prompts: list, expected: list) -> None:
    """Aborted requests leave nothing behind, in the worker or in the cache."""
    engine, runner = trees.llm_engine, runner_of(trees)
    drafts = Oracle(runner, truth_of(prompts, expected))
    try:
        for i, prompt in enumerate(prompts):
            engine.add_request(f"a{i}", prompt, greedy(TOKENS))
        finished = {}
        for step in range(10_000):
            if step == 3:
                engine.abort_request([f"a{i}" for i in range(0, len(prompts), 2)])
            if not engine.has_unfinished_requests():
                break
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
        assert generate(trees, prompts, greedy(TOKENS)) == expected
    finally:
        drafts.remove()
    kept = range(1, len(prompts), 2)
    assert [finished[f"a{i}"] for i in kept] == [expected[i] for i in kept]
    generate(trees, prompts[:1], greedy(1))  # one more step, in which the last requests are removed
    assert len(runner.pending) <= 1 and len(runner.policy.signals) <= 1


@pytest.mark.parametrize("nodes", [7, 9])
def test_compile_cache_is_shared_between_caps(
    make_llm: Callable[..., Any], tiny_head: Path, prompts: list, expected: list, nodes: int
) -> None:
    """Another cap on the same compile cache starts, and decodes right."""
    tree = {"policy": "static", "shape": {"depth": 5, "width": 4, "nodes": nodes}}
    llm = make_llm(speculative_config=adaptivespec(tiny_head, tree=tree), enforce_eager=False)
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, expected), greedy(TOKENS), max_nodes=nodes)
    assert tokens == expected
    assert stats["accepted"] > 50


def test_qwen3_target(make_llm: Callable[..., Any], tmp_path: Path, tiny_head: Path) -> None:
    target = tiny.make_target(tmp_path / "qwen3", architecture="Qwen3ForCausalLM")
    prompts = random_prompts(4, seed=69)
    expected = generate(make_llm(target), prompts, greedy(TOKENS))
    llm = make_llm(target, speculative_config=adaptivespec(tiny_head))
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, expected), greedy(TOKENS))
    assert tokens == expected
    assert stats["accepted"] > 20


@pytest.mark.parametrize("draft_vocabulary", [tiny.VOCABULARY, 128])
def test_draft_vocabularies(
    make_llm: Callable[..., Any], tmp_path: Path, prompts: list, expected: list, draft_vocabulary: int
) -> None:
    """A head over the whole vocabulary (no map) and one over a part of it."""
    head = tiny.make_head(tmp_path / "head", draft_vocabulary=draft_vocabulary)
    llm = make_llm(speculative_config=adaptivespec(head))
    assert generate(llm, prompts, greedy(TOKENS)) == expected
