"""A simulation is what the engine does: the same steps with the demo's model, prompt by prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm import chat
from adaptivespec_vllm.config import resolve
from adaptivespec_vllm.demo.model import prepare
from adaptivespec_vllm.policy import make_policy
from adaptivespec_vllm.runtime import cache_dir
from adaptivespec_vllm.simulate.cli import DEFAULT_RECORDING
from adaptivespec_vllm.simulate.recording import Recording
from adaptivespec_vllm.simulate.replay import groups, replay
from adaptivespec_vllm.simulate.tables import SHIPPED, costs_of
from tests.e2e.conftest import generate, greedy
from tests.e2e.oracle import runner_of

DATA = Path(__file__).parent / "data" / "prompts.jsonl"
TEXTS = 3
COSTS = "cpu-2core"
STATIC = {"policy": "static", "shape": {"depth": 5, "width": 4, "nodes": 8}}
COST_AWARE = {"policy": "cost-aware", "shape": {"depth": 8, "width": 4, "nodes": 24}}


@pytest.fixture(scope="module")
def recording() -> Recording:
    """The first texts of the one that is shipped."""
    shipped = Recording.read(DEFAULT_RECORDING)
    return Recording([group.slots[0][0] for group in groups(shipped, 1)][:TEXTS], shipped.about)


@pytest.fixture(scope="module")
def engine(make_llm: Callable[..., Any]) -> Any:
    demo = prepare(cache_dir(), lambda message: None)
    return make_llm(
        demo.model,
        skip_tokenizer_init=False,
        max_model_len=512,
        block_size=128,
        kv_cache_memory_bytes=160 << 20,
        speculative_config={
            "method": "adaptivespec",
            "model": str(demo.head),
            "num_speculative_tokens": 24,
            "tree": STATIC,
        },
    )


def decoded(engine: Any, recording: Recording, tree: dict[str, Any]) -> list[tuple[int, int]]:
    """Steps and verified nodes of each text on the engine."""
    rows = {row["id"]: row["prompt"] for row in map(json.loads, DATA.read_text().splitlines())}
    runner_of(engine).configure(resolve({"num_speculative_tokens": 24, "tree": tree}))
    engine.reset_prefix_cache()
    engine.collective_rpc("adaptivespec_stats")
    counted = []
    for text in recording.texts:
        tokens = chat.encode(engine.get_tokenizer(), [{"role": "user", "content": rows[text.id]}])
        # Its first token comes with the prompt; texts of the recording end before that many others or with their own.
        generate(engine, [{"prompt_token_ids": tokens}], greedy(text.tokens + 1, ignore_eos=False))
        stats = engine.collective_rpc("adaptivespec_stats")[0]
        counted.append((stats["steps"] - 1, stats["drafted_nodes"]))
    return counted


def simulated(recording: Recording, tree: dict[str, Any]) -> list[tuple[int, int]]:
    costs = costs_of(COSTS)
    policy = make_policy(resolve({"tree": tree}), costs)
    return [(tally.steps, tally.nodes) for _, tally in replay(recording, policy, costs)]


def test_a_static_tree_takes_the_same_steps(engine: Any, recording: Recording) -> None:
    for (steps, nodes), (own_steps, own_nodes) in zip(
        decoded(engine, recording, STATIC), simulated(recording, STATIC), strict=True
    ):
        # One step more or less: a near-tie of two drafts falls otherwise on another processor.
        assert abs(own_steps - steps) <= 1 and abs(own_nodes - nodes) <= 8


def test_the_policy_takes_about_the_same_steps(engine: Any, recording: Recording) -> None:
    """It learns from every step, so that the rounding of recorded numbers has consequences."""
    engine_wide = decoded(engine, recording, COST_AWARE | {"costs": str(SHIPPED[COSTS])})
    (steps, nodes), (own_steps, own_nodes) = (
        [sum(column) for column in zip(*counted, strict=True)]
        for counted in (engine_wide, simulated(recording, COST_AWARE))
    )
    assert own_steps == pytest.approx(steps, rel=0.05)
    assert own_nodes == pytest.approx(nodes, rel=0.1)
