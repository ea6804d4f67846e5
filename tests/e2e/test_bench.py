"""The benchmark's turns on real engines: texts, counters, and the stopwatch held to vLLM's own arms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.bench import measure
from adaptivespec_vllm.bench.arms import parse
from adaptivespec_vllm.bench.engines import Engine
from adaptivespec_vllm.bench.figures import summarise
from adaptivespec_vllm.bench.prompts import Encoded, batches
from adaptivespec_vllm.bench.result import Figures, Place, Result
from adaptivespec_vllm.bench.trace import trace
from tests.e2e.conftest import random_prompts

TREE, MARGIN = "tree:6,8,12", "tree:6,8,12@1e-9"
"""A random head is accepted by next to no target; this margin lets most of it pass."""
PLACE = Place(batch=2, context=None)
TOKENS = 12


@pytest.fixture(scope="module")
def result(make_llm: Callable[..., Any], tiny_head: Path, plain: Any, trees: Any, tmp_path_factory: Any) -> Result:
    shared = {"plain": plain, TREE: trees}
    arms = parse(f"stock:1 {TREE} {MARGIN}", str(tiny_head))
    assert arms[2].speculative == {"method": "adaptivespec", "model": str(tiny_head)} | {
        "tree": {"policy": "static", "shape": {"depth": 6, "width": 8, "nodes": 12}}
    }  # which is what the shared engine runs
    engines = [Engine.of(arm, shared.get(arm.name) or make_llm(speculative_config=arm.speculative)) for arm in arms]
    prompts = [
        Encoded(f"{kind}/{number}", kind, tuple(prompt["prompt_token_ids"]))
        for kind, seed in (("math", 1), ("code", 2))
        for number, prompt in enumerate(random_prompts(2, seed=seed))
    ]
    measured = Result(provenance={}, settings={}, arms=[engine.info for engine in engines])
    parameters = measure.sampling(0.0, 0, ignore_eos=True, detokenize=False)
    plan = {PLACE: batches(prompts, PLACE.batch)}
    measure.run(measured, engines, plan, tokens=TOKENS, repeats=2, parameters=parameters)
    summarise(measured)
    return Result.read(measured.write(tmp_path_factory.mktemp("bench")))


def test_a_trace_tells_what_the_worker_counts(trees: Any, make_llm: Callable[..., Any], tiny_head: Path) -> None:
    prompt = Encoded("math/0", "math", tuple(random_prompts(1, seed=1)[0]["prompt_token_ids"]))
    parameters = measure.sampling(0.0, 0, ignore_eos=True, detokenize=False, logprobs=1)
    _, lossy = parse(MARGIN, str(tiny_head))
    engine = Engine.of(lossy, make_llm(speculative_config=lossy.speculative))
    told = trace(engine, prompt, "say a", TOKENS, parameters)
    assert told.emitted == TOKENS and len(told.steps[0].tokens) == 1
    assert sum(step.promoted for step in told.steps) > 0
    assert all(len(step.tokens) <= step.depth + 1 <= step.nodes + 1 <= 13 for step in told.steps)
    # The last of a step is the target's own; of the last step it may be cut off.
    assert all(len(step.tokens) > step.promoted for step in told.steps[:-1])
    (strict,) = parse(TREE, str(tiny_head))[1:]
    assert not any(step.promoted for step in trace(Engine.of(strict, trees), prompt, "", TOKENS, parameters).steps)


def figures(result: Result, arm: str) -> Figures:
    return next(row for row in result.figures if (row.arm, row.kind) == (arm, "all"))


def test_every_arm_took_every_turn(result: Result) -> None:
    turns = [(sample.arm, sample.kind, sample.round) for sample in result.samples]
    names = ["plain", "stock:1", TREE, MARGIN]
    assert sorted(turns) == sorted((name, kind, r) for name in names for kind in ("math", "code") for r in (0, 1))
    assert all(sample.emitted == 2 * (TOKENS - 1) and sample.seconds > 0 for sample in result.samples)


def test_texts_are_plain_decodings_unless_a_margin_is_set(result: Result) -> None:
    same = {row.arm: (row.same_text, row.requests) for row in result.figures if row.kind == "all"}
    assert same["stock:1"] == same[TREE] == (8, 8)
    assert same[MARGIN][0] < 8


def test_steps_agree_with_what_our_engines_count(result: Result) -> None:
    """Lengths are taken from outputs, for every arm alike; our engines count the same steps themselves."""
    for sample in result.samples:
        if sample.drafted:
            assert sample.drafted["steps"] == sample.steps
    plain, strict, lossy = (figures(result, name) for name in ("plain", TREE, MARGIN))
    assert plain.accepted_length == 1 and plain.accepted_at_depth == []
    assert lossy.accepted_length > 2 > strict.accepted_length >= 1
    assert lossy.promotions > 0 == strict.promotions
    assert 1 < strict.nodes <= 12 and lossy.depth <= 6


def test_time_is_split_for_every_arm(result: Result) -> None:
    parts = {row.arm: row.split_ms for row in result.figures if row.kind == "all"}
    assert set(parts["plain"]) == {"target forward", "rest"}
    assert set(parts["stock:1"]) == {"target forward", "draft chain", "rest"}
    assert {"target forward", "tree attention", "draft first pass", "draft levels", "verify"} <= set(parts[TREE])
    for row in result.figures:
        assert sum(row.split_ms.values()) == pytest.approx(row.ms_per_step)


def test_ours_stands_beside_the_best(result: Result) -> None:
    standing = result.standings[-1]
    assert (standing.kind, standing.best_stock, standing.best_static) == ("all", "stock:1", TREE)
    assert {(r.arm, r.role) for r in standing.relatives} == {
        (TREE, "best stock"),
        (MARGIN, "best stock"),
        (MARGIN, "best static tree"),
        (MARGIN, "same without margin"),
    }
