"""The cost-aware policy on the V2 model runner, which decides there from what is a step old; collected by
``test_v2.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptivespec_vllm.engine.decision_log import VARIABLE, read_log
from adaptivespec_vllm.engine.v1.costs import facts_of
from adaptivespec_vllm.policy import replay
from adaptivespec_vllm.types import NO_TREE
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, schedule_ahead, truth_of
from tests.e2e.oracle import decode_with_oracle, runner_of
from tests.e2e.v2_runner import scheduled_drafts

TOKENS = 32
CHEAP = {"target": [[1, 1.0], [64, 1.02]], "first": [[1, 0.002]], "level": [[1, 0.001]]}
DEAR = {"target": [[1, 1.0], [2, 9.0]], "first": [[1, 2.0]], "level": [[1, 2.0]]}


@pytest.fixture(scope="module")
def prompts() -> list:
    return random_prompts(4, seed=92)


@pytest.fixture(scope="module")
def expected(plain: Any, prompts: list) -> list[list[int]]:
    return generate(plain, prompts, greedy(TOKENS))


@pytest.fixture(scope="module")
def engine(make_llm: Callable[..., Any], tiny_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine that decides by costs which a file gives."""
    folder = tmp_path_factory.mktemp("costs")
    kept: dict[str, Any] = {}

    def make(costs: dict[str, Any]) -> Any:
        key = json.dumps(costs)
        if key not in kept:
            path = folder / f"{len(kept)}.json"
            path.write_text(key)
            tree = {"policy": "cost-aware", "costs": str(path)}
            kept[key] = make_llm(speculative_config=adaptivespec(tiny_head, tree=tree))
        return kept[key]

    return make


def counts_of(llm: Any) -> dict[str, Any]:
    counts: dict[str, Any] = llm.collective_rpc("adaptivespec_stats")[0]
    return counts


def test_costs_are_measured_and_decide(
    make_llm: Callable[..., Any], tiny_head: Path, prompts: list, expected: list, tmp_path: Path
) -> None:
    """The default configuration: measured at start, corrected by what steps take, replayed from its log."""
    log = tmp_path / "decisions.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(log))
        patch.setenv("VLLM_ADAPTIVESPEC_CACHE", str(tmp_path))
        llm = make_llm(speculative_config={"method": "adaptivespec", "model": str(tiny_head)})
    runner = runner_of(llm)
    measured = runner.planner.costs
    for table in (measured.target, measured.first, measured.level):
        rows, seconds = zip(*table.points, strict=True)
        assert rows[:5] == (1, 2, 3, 4, 5) and 0 < seconds[0] <= seconds[-1] < 1.0
    assert facts_of(runner)["model runner"] == "V2"
    answer = llm.collective_rpc("adaptivespec_costs")[0]
    assert answer["costs"] == measured.to_dict()
    for _ in range(3):
        assert generate(llm, prompts, greedy(TOKENS)) == expected
    events = read_log(log)
    assert [event["call"] for event in events].count("begin") > 2 * TOKENS
    assert {"values", "expand", "keep", "observe"} <= {event["call"] for event in events}
    assert replay(events, runner.settings) == []
    assert runner.planner.policy.costs.overhead > 0, "what steps took besides was learnt"
    assert not runner.planner.forecast._last.keys() - runner.planner.alive


def test_nothing_is_drafted_where_it_is_too_dear(engine: Any, prompts: list, expected: list) -> None:
    """Steps without drafts are plain decoding: one row a request, vLLM's own sampler, and no pass of the head."""
    llm = engine(DEAR)
    runner = runner_of(llm)
    generate(llm, prompts, greedy(TOKENS))  # uses up what probes may take at the beginning
    counts_of(llm)
    passes, rows = [], []
    stock, sampler = runner.speculator._prefill, runner.sampler.sample

    def watched_pass(*args: Any, **kwargs: Any) -> Any:
        passes.append(len(rows))
        return stock(*args, **kwargs)

    def watched_sampler(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(logits))
        return sampler(logits, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.speculator, "_prefill", watched_pass)
        patch.setattr(runner.sampler, "sample", watched_sampler)
        assert generate(llm, prompts, greedy(TOKENS)) == expected
    counts = counts_of(llm)
    assert counts["plain_engine_steps"] >= TOKENS - 4
    assert counts["steps"] == 4 * TOKENS == counts["emitted"]
    assert rows.count(4) >= TOKENS - 4
    assert len(passes) < TOKENS / 4


def test_trees_follow_costs(engine: Any, prompts: list, expected: list) -> None:
    """A head of random weights is hardly ever right: rows that cost next to nothing are used, others are not."""
    llm = engine(CHEAP)
    with scheduled_drafts(llm) as scheduled:
        assert generate(llm, prompts, greedy(TOKENS)) == expected
    cheap = counts_of(llm)
    rows = {count for counts in scheduled for count in counts.values()}
    assert len(rows) > 2, "as many rows as are worth it, request by request"
    assert generate(engine(DEAR), prompts, greedy(TOKENS)) == expected
    dear = counts_of(engine(DEAR))
    assert cheap["drafted_nodes"] > 10 * max(1, dear["drafted_nodes"])


def test_accepted_trees_give_the_text(engine: Any, prompts: list, expected: list) -> None:
    tokens, counts = decode_with_oracle(engine(CHEAP), prompts, truth_of(prompts, expected), greedy(TOKENS))
    assert tokens == expected
    assert counts["accepted"] > TOKENS
    assert engine(CHEAP).generate(prompts, greedy(TOKENS), use_tqdm=False)


def test_seeds_give_the_draws_of_plain_decoding(engine: Any, plain: Any, prompts: list) -> None:
    params = greedy(TOKENS // 2, temperature=0.8, seed=5)
    expected = generate(plain, prompts, params)
    for costs in (CHEAP, DEAR):
        assert generate(engine(costs), prompts, params) == expected


def test_rows_that_were_put_off_give_the_same_drafts(trees: Any, prompts: list, expected: list) -> None:
    """Drafting once in a while finds the head's cache as drafting always does; without the rows it would not."""
    runner = runner_of(trees)
    speculator, planner = runner.speculator, runner.planner

    def first_levels(**changes: Any) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        steps = 0
        plan, draft = planner.plan, speculator.draft

        def rarely(*args: Any) -> Any:
            nonlocal steps
            made, steps = plan(*args), steps + 1
            if steps % 7 == 0:
                return made
            planner.planned = dict.fromkeys(planner.planned, 0)
            return replace(made, shapes=[NO_TREE] * len(made.shapes))

        def watched(*args: Any) -> Any:
            grid = draft(*args)
            if grid.ahead is not None:
                seen.append(grid.ahead.log_probs.clone())
            return grid

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "plan", rarely)
            patch.setattr(speculator, "draft", watched)
            for name, change in changes.items():
                patch.setattr(speculator, name, change)
            trees.reset_prefix_cache()
            assert generate(trees, prompts[:2], greedy(TOKENS)) == expected[:2]
        return seen

    taken = []
    stock = speculator.head.first_pass

    def catch_up(rows: Any, *args: Any) -> Any:
        taken.append(len(rows))
        return stock(rows, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator.head, "first_pass", catch_up)
        late = first_levels()
    assert taken and max(taken) >= 2 * 5
    at_once = first_levels(_puts_off=lambda *args: False)
    assert len(late) == len(at_once) >= 4
    for ours, theirs in zip(late, at_once, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)

    def lose(*args: Any) -> None:
        speculator.backlog.waiting[:] = 0

    lost = first_levels(_catch_up=lose)
    assert any((ours - theirs).abs().max() > 0.05 for ours, theirs in zip(lost, at_once, strict=True))


def test_rows_follow_plans_under_asynchronous_scheduling(
    make_llm: Callable[..., Any],
    tiny_head: Path,
    prompts: list,
    expected: list,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler hears of a plan with the output of its step; texts are the same, rows as many as are worth it."""
    schedule_ahead(monkeypatch)
    drafted = {}
    for name, costs in (("cheap", CHEAP), ("dear", DEAR)):
        path = tmp_path / name
        path.write_text(json.dumps(costs))
        tree = {"policy": "cost-aware", "costs": str(path)}
        llm = make_llm(speculative_config=adaptivespec(tiny_head, tree=tree))
        assert type(llm.llm_engine.engine_core.engine_core.scheduler).__name__ == "AsyncScheduler"
        with scheduled_drafts(llm) as scheduled:
            assert generate(llm, prompts, greedy(TOKENS)) == expected
        drafted[name] = sum(count for counts in scheduled for count in counts.values())
        tokens, counts = decode_with_oracle(llm, prompts, truth_of(prompts, expected), greedy(TOKENS))
        assert tokens == expected
        if name == "cheap":
            assert counts["accepted"] > 10
    assert drafted["cheap"] > 3 * drafted["dear"]
