"""Costs of a step: measured at start, kept for the next start, read from a file where the configuration names one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm import runtime
from adaptivespec_vllm.config import resolve
from adaptivespec_vllm.engine import cost_cache
from adaptivespec_vllm.engine.v1 import costs as measuring
from adaptivespec_vllm.policy.costs import Costs
from tests.e2e.conftest import generate, greedy, random_prompts
from tests.e2e.oracle import runner_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(runtime.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(runtime, "busy", lambda: None)
    return tmp_path


def test_costs_are_measured_once(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(speculative_config={"method": "adaptivespec", "model": str(tiny_head)})
    runner = runner_of(llm)
    costs = runner.policy.costs
    for table in (costs.target, costs.first, costs.level):
        rows, seconds = zip(*table.points, strict=True)
        assert rows[:5] == (1, 2, 3, 4, 5) and rows[-1] <= 8 * (1 + 24)
        assert 0 < seconds[0] <= seconds[-1] < 1.0
    (kept,) = cost_cache.find(runner.model_config.model, str(tiny_head))
    assert kept.costs == costs
    assert kept.facts["dtype"] == "float32" and kept.facts["rows"] == 8 * (1 + 24)
    assert kept.path.parent == cache / "costs"
    assert cost_cache.find(str(tiny_head), str(tiny_head)) == []

    prompts = random_prompts(4, seed=311)
    assert generate(llm, prompts, greedy(30)) == generate(plain, prompts, greedy(30))

    def never(runner: object) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "measured_costs", never)
        assert measuring.costs_of(runner) == costs
    for content in ("", "[]", '{"costs": 1}', '{"facts": [], "costs": {"target": "?"}, "measured": 0}'):
        kept.path.write_text(content)
        assert cost_cache.look_up(kept.facts) is None
    assert measuring.costs_of(runner) != costs  # a file that is not ours is measured over
    assert cost_cache.look_up(kept.facts) != costs


def test_costs_of_a_busy_machine_are_not_kept(
    make_llm: Callable[..., Any], tiny_head: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "busy", lambda: 9.0)
    make_llm(speculative_config={"method": "adaptivespec", "model": str(tiny_head)})
    assert not (cache / "costs").exists()


def test_a_file_wins_over_measured_costs(trees: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"target": [[1, 1.0], [64, 1.5]], "first": [[1, 0.2]], "level": [[1, 0.1]], "overhead": 0.25}
    (tmp_path / "costs.json").write_text(json.dumps(tables))
    given = Costs.from_dict(tables)
    measured = Costs.from_dict({"target": [[1, 1e-9]], "first": [[1, 1e-9]], "level": [[1, 1e-9]]})
    runner = runner_of(trees)
    before, shape = runner.settings, {"depth": 6, "width": 4, "nodes": 12}
    monkeypatch.setattr(runner, "costs", measured)
    try:
        runner.configure(resolve({"tree": {"shape": shape, "costs": str(tmp_path / "costs.json")}}))
        generate(trees, random_prompts(2, seed=312), greedy(100))
        assert runner.policy.costs == given  # nothing was learnt that the file does not say
        runner.configure(resolve({"tree": {"shape": shape}}))
        assert runner.policy.costs == measured
        generate(trees, random_prompts(2, seed=312), greedy(100))
        assert runner.policy.costs.overhead > 1e-6 and runner.policy.costs.first == measured.first
    finally:
        runner.configure(before)
