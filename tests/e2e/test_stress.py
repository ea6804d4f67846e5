"""An engine that is short of everything: blocks, room in a step, seats. Texts stay those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec_vllm.config import resolve
from adaptivespec_vllm.engine.v1.cpu_attention import _layout_of
from tests.e2e import tiny
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts
from tests.e2e.oracle import Oracle, decode_with_oracle, runner_of
from tests.e2e.scarce import SCARCE, Arrival, assert_nothing_left, drive, free_blocks, scheduler_of

MAX_LEN = 256

PARAMETERS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"allowed_token_ids": list(range(3, 500, 2))},
    {"min_tokens": 9, "stop_token_ids": list(range(3, 512, 5))},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.1, "top_p": 0.9, "top_k": 40, "seed": 6},
    {"logprobs": 2},
]


@pytest.fixture(scope="module")
def scarce(make_llm: Callable[..., Any], tiny_head: Path) -> Any:
    return make_llm(speculative_config=adaptivespec(tiny_head), **SCARCE)


@pytest.fixture(scope="module")
def free(scarce: Any) -> int:
    """Blocks that are free before anything was asked."""
    return free_blocks(scarce)


def parameters(kind: int, tokens: int) -> Any:
    own = PARAMETERS[kind]
    return greedy(tokens, **(own | {"min_tokens": min(own.get("min_tokens", 0), tokens)}))


def mixed(count: int, seed: int) -> list[Arrival]:
    """Requests of every length and kind that arrive in bursts."""
    rng = random.Random(seed)
    arrivals = []
    for number in range(count):
        length = rng.choice([1, 1, 2, 31, 32, 33, 64, rng.randint(3, 120), rng.randint(100, 250)])
        room = MAX_LEN - length
        tokens = rng.choice([1, 2, rng.randint(1, 60), room, room - 1])
        prompt = [rng.randrange(3, tiny.VOCABULARY) for _ in range(length)]
        params = parameters(number % len(PARAMETERS), max(1, min(tokens, room)))
        arrivals.append(Arrival(prompt, params, at=rng.choice([0, 0, 3, 9]), priority=rng.choice([-1, 0, 1])))
    return arrivals


def plain_tokens(plain: Any, arrivals: list[Arrival]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": list(arrival.prompt)} for arrival in arrivals]
    return generate(plain, prompts, [arrival.params for arrival in arrivals])


def truths(arrivals: list[Arrival], expected: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """What oracles hide; it goes on past the end of a text."""
    return {tuple(a.prompt): [*t, *[5] * 80] for a, t in zip(arrivals, expected, strict=True)}


@pytest.mark.parametrize("drafts", ["oracle", "head"])
def test_64_requests_of_every_kind(scarce: Any, free: int, plain: Any, drafts: str) -> None:
    arrivals = mixed(64, seed=401)
    expected = plain_tokens(plain, arrivals)
    oracle = Oracle(runner_of(scarce), truths(arrivals, expected)) if drafts == "oracle" else None
    scarce.collective_rpc("adaptivespec_stats")
    try:
        run = drive(scarce, arrivals)
    finally:
        if oracle:
            oracle.remove()
    stats = scarce.collective_rpc("adaptivespec_stats")[0]
    assert [run.tokens[number] for number in range(len(arrivals))] == expected
    assert len(run.preempted) > 5, "nothing was scarce: nothing was tested"
    assert stats["drafted_nodes"] > 500
    assert drafts == "head" or stats["accepted"] > 500
    assert_nothing_left(scarce, free)


STAGES = ["waiting", "prefilling", "first tree", "tree pending", "preempted"]


@pytest.mark.parametrize("stage", STAGES)
def test_abort(scarce: Any, free: int, plain: Any, stage: str) -> None:
    """At each stage of a request's life; the others do not notice."""
    arrivals = [Arrival(p["prompt_token_ids"], greedy(90)) for p in random_prompts(20, seed=402, longest=120)]
    expected = plain_tokens(plain, arrivals)
    scheduler, aborted = scheduler_of(scarce), set()

    def victims(step: int, runner: Any) -> list[int]:
        if len(aborted) >= 5:
            return []
        found = {
            "waiting": lambda: [r.request_id for r in scheduler.waiting if not r.num_preemptions],
            "preempted": lambda: [r.request_id for r in scheduler.waiting if r.num_preemptions],
            "prefilling": lambda: [
                r.request_id for r in scheduler.running if 0 < r.num_computed_tokens < r.num_prompt_tokens
            ],
            "first tree": lambda: [
                r.request_id for r in scheduler.running if r.spec_token_ids and r.num_output_tokens == 1
            ],
            "tree pending": lambda: [
                r.request_id for r in scheduler.running if r.spec_token_ids and r.num_output_tokens > 5
            ],
        }[stage]()[:1]
        # Request ids of the scheduler carry a suffix behind the number.
        numbers = [int(request.split("-")[0]) for request in found]
        aborted.update(numbers)
        return numbers

    oracle = Oracle(runner_of(scarce), truths(arrivals, expected))
    try:
        run = drive(scarce, arrivals, victims)
    finally:
        oracle.remove()
    assert aborted, "no request was ever at this stage"
    assert run.tokens == {n: tokens for n, tokens in enumerate(expected) if n not in aborted}
    assert_nothing_left(scarce, free)


def test_abort_with_rows_waiting_for_the_head(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, tmp_path: Path
) -> None:
    """Requests that are not worth drafting for have a backlog; it goes with them."""
    from tests.e2e.test_putting_off import costs_file

    tree = {"costs": costs_file(tmp_path / "costs.json", 0.5)}
    llm = make_llm(speculative_config=adaptivespec(tiny_head, tree=tree), **SCARCE)
    free = free_blocks(llm)
    arrivals = [Arrival(p["prompt_token_ids"], greedy(60)) for p in random_prompts(8, seed=403)]
    expected = plain_tokens(plain, arrivals)
    waited = set()

    def victims(step: int, runner: Any) -> list[int]:
        if step != 25:
            return []
        waited.update(int(request.split("-")[0]) for request in runner.drafter.backlog.parts)
        return sorted(waited)[::2]

    run = drive(llm, arrivals, victims)
    assert len(waited) > 2
    gone = set(sorted(waited)[::2])
    assert run.tokens == {n: tokens for n, tokens in enumerate(expected) if n not in gone}
    assert_nothing_left(llm, free)


Blocks = dict[tuple[int, ...], dict[str, torch.Tensor]]
"""Keys and values of a cached block in each layer of the target, by all tokens up to its end."""


@contextmanager
def cached_blocks(llm: Any) -> Iterator[Blocks]:
    """What the cache holds of each request at the moment that it ends."""
    scheduler, runner = scheduler_of(llm), runner_of(llm)
    manager, size, seen = scheduler.kv_cache_manager, scheduler.block_size, {}
    stock = manager.free
    layers = {
        name: layer
        for name, layer in runner.compilation_config.static_forward_context.items()
        if name.startswith("model.layers.") and int(name.split(".")[2]) < tiny.LAYERS
    }

    def free(request: Any) -> Any:
        for number, block in enumerate(manager.get_blocks(request.request_id).blocks[0]):
            if block.block_hash is None:
                continue
            tokens = tuple(request.all_token_ids[: (number + 1) * size])
            assert len(tokens) == (number + 1) * size, "a block was cached before its tokens were accepted"
            content = seen[tokens] = {}
            for name, layer in layers.items():
                _, heads, block_size, both = layer.kv_cache.shape
                layout = _layout_of(layer.isa, block_size, heads, both // 2, layer.kv_cache.dtype, "auto")
                content[name] = torch.stack([view[block.block_id] for view in layout.views(layer.kv_cache)])
        return stock(request)

    manager.free = free
    try:
        yield seen
    finally:
        manager.free = stock


def differing(ours: Blocks, theirs: Blocks) -> int:
    """Blocks that differ in any layer by more than rounding."""
    return sum(
        not all(torch.allclose(tensor, theirs[tokens][name], atol=2e-4, rtol=1e-4) for name, tensor in content.items())
        for tokens, content in ours.items()
    )


def test_cached_blocks_hold_what_plain_decoding_computes(
    trees: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts, answers and equal prompts: every block, in every layer, is the one of a plain engine."""
    prompts = random_prompts(3, seed=404, shortest=60, longest=100) * 4
    prompts += random_prompts(4, seed=405, shortest=1, longest=30)
    lengths = [60 + 3 * number for number in range(len(prompts))]
    plain.reset_prefix_cache()
    with cached_blocks(plain) as theirs:
        # One token more: plain decoding has no keys and values of the last one, a tree that went past the end has.
        whole = generate(plain, prompts, [greedy(length + 1) for length in lengths])
    expected = [tokens[:-1] for tokens in whole]
    by_length = sorted(zip(prompts, expected, strict=True), key=lambda pair: len(pair[1]))
    truth = {tuple(prompt["prompt_token_ids"]): [*tokens, *[5] * 20] for prompt, tokens in by_length}
    params = [greedy(length) for length in lengths]
    for commit in (True, False):
        trees.reset_prefix_cache()
        if not commit:  # the negative control
            monkeypatch.setattr(runner_of(trees), "_commit", lambda step: None)
        with cached_blocks(trees) as ours:
            tokens, _ = decode_with_oracle(trees, prompts, truth, params)
        trees.reset_prefix_cache()
        if commit:
            assert tokens == expected
            assert len(ours) > 20 and ours.keys() <= theirs.keys()
            assert not differing(ours, theirs)
        else:
            known = {tokens: content for tokens, content in ours.items() if tokens in theirs}
            assert len(known) < len(ours) or differing(known, theirs)


SHAPES = [(1, 1, 1), (2, 4, 6), (6, 8, 12), (12, 1, 12)]

fuzzed = st.tuples(
    st.integers(0, 2**16),
    st.sampled_from(SHAPES),
    st.sampled_from(["static", "adaptive", "cost-aware"]),
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 31, 32, 33, 70, 150, 250, 255]),
            st.integers(1, 90),
            st.integers(0, len(PARAMETERS) - 1),
            st.integers(0, 40),
            st.integers(-1, 1),
            st.none() | st.integers(0, 80),
        ),
        min_size=1,
        max_size=14,
    ),
    st.booleans(),
)


@settings(max_examples=25, derandomize=True)
@given(fuzzed)
def test_any_mix_of_requests(scarce: Any, free: int, plain: Any, case: Any) -> None:
    """Arrivals, aborts, lengths, parameters, priorities, policies and shapes, drawn together."""
    seed, (depth, width, nodes), policy, requests, oracle = case
    rng = random.Random(seed)
    arrivals = [
        Arrival(
            [rng.randrange(3, tiny.VOCABULARY) for _ in range(length)],
            parameters(kind, min(tokens, MAX_LEN - length)),
            at,
            priority,
            None if abort is None else at + abort,
        )
        for length, tokens, kind, at, priority, abort in requests
    ]
    expected = plain_tokens(plain, arrivals)
    runner = runner_of(scarce)
    tree = {"policy": policy, "shape": {"depth": depth, "width": width, "nodes": nodes}}
    if policy == "adaptive":
        tree = {"policy": policy, "low": {"depth": 1, "width": 2, "nodes": 2}, "high": tree["shape"]}
    runner.configure(resolve({"model": "head", "tree": tree, "num_speculative_tokens": 12}))
    drafts = Oracle(runner, truths(arrivals, expected), seed=seed) if oracle else None
    try:
        run = drive(scarce, arrivals)
    finally:
        if drafts:
            drafts.remove()
    for number, arrival in enumerate(arrivals):
        if arrival.abort_at is None or number in run.tokens:
            assert run.tokens[number] == expected[number]
    assert_nothing_left(scarce, free)
