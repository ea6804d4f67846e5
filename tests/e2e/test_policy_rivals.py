"""Policies of other methods on the real engine: the text is that of plain decoding, the trees are what each says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.engine.decision_log import VARIABLE, read_log
from adaptivespec_vllm.policy import replay
from adaptivespec_vllm.types import DraftTree
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts
from tests.e2e.oracle import runner_of

TOKENS = 30


@pytest.fixture
def decoded(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, Any]], tuple[list[DraftTree], list[dict[str, Any]]]]:
    def run(tree: dict[str, Any]) -> tuple[list[DraftTree], list[dict[str, Any]]]:
        """All trees of some requests, and the log of decisions."""
        log = tmp_path / "decisions.jsonl"
        monkeypatch.setenv(VARIABLE, str(log))
        prompts = random_prompts(4, seed=91)
        llm = make_llm(speculative_config=adaptivespec(tiny_head, tree=tree))
        runner = runner_of(llm)
        trees: list[DraftTree] = []
        keep = runner.keep_trees
        runner.keep_trees = lambda drafted: (trees.extend(drafted), keep(drafted))[1]
        assert generate(llm, prompts, greedy(TOKENS)) == generate(plain, prompts, greedy(TOKENS))
        drafted = [tree for tree in trees if len(tree)]
        events = read_log(log)
        assert replay(events, runner.settings) == []
        for own in ({"adaptivespec_max_nodes": 4}, {"adaptivespec_max_nodes": 1}):
            assert generate(llm, prompts, greedy(TOKENS, extra_args=own)) == generate(plain, prompts, greedy(TOKENS))
        return drafted, events

    return run


def path_values(tree: DraftTree) -> list[float]:
    values = [0.0]
    for parent, log_prob in zip(tree.parents, tree.log_probs, strict=True):
        values.append(values[parent] + log_prob)
    return values[1:]


def test_talon(decoded: Any) -> None:
    trees, _ = decoded({"policy": "talon", "mu": 0.2, "shape": {"depth": 4, "width": 6, "nodes": 24}})
    assert len(trees) > 60
    wide = 0
    for tree in trees:
        by_level: dict[int, list[float]] = {}
        for depth, value in zip(tree.depths(), path_values(tree), strict=True):
            by_level.setdefault(depth, []).append(value)
        assert len(tree) == 24 or max(by_level) == 4
        assert len(by_level[1]) == 6
        for depth, values in by_level.items():
            assert depth == 1 or min(values) >= max(values) + math.log(0.2) - 1e-5
        wide += any(len(values) > 6 for values in by_level.values())
    assert wide > 10
    assert len({max(tree.depths()) for tree in trees}) > 1


def test_ddd(decoded: Any) -> None:
    trees, events = decoded({"policy": "ddd", "threshold": -1.5, "shape": {"depth": 5, "width": 4, "nodes": 20}})
    assert len({max(tree.depths()) for tree in trees}) > 1
    expanded = [event for event in events if event["call"] == "expand"]
    for event in expanded:
        for values, count in zip(event["arguments"]["frontiers"], event["result"], strict=True):
            goes_on = bool(values) and math.log(sum(map(math.exp, values))) > -1.5
            assert count == (len(values) if goes_on else 0)
    stopped = sum(not any(event["result"]) for event in expanded)
    assert 0 < stopped < len(expanded)


def test_sglang_adaptive(decoded: Any) -> None:
    trees, events = decoded({"policy": "sglang-adaptive", "warmup": 2, "interval": 2})
    lengths = [
        shape[0]
        for event in events
        if event["call"] == "bounds"
        for shape in event["result"]["shapes"]
        if shape[2]  # not a prompt that is still read
    ]
    assert lengths[0] == 5 and lengths[-1] == 1  # a random head's drafts are hardly ever accepted
    assert set(lengths) <= {1, 3, 5, 7}
    assert all(tree.parents == list(range(len(tree))) for tree in trees)
