"""What the policy decides on the real engine can be logged and computed again; without native ops all works as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.engine.decision_log import VARIABLE, read_log
from adaptivespec_vllm.ops import _native
from adaptivespec_vllm.policy import replay
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, truth_of
from tests.e2e.oracle import Oracle, runner_of


@pytest.mark.parametrize("scope", ["request", "batch"])
def test_logged_decisions_are_what_the_policy_says(
    make_llm: Callable[..., Any], tiny_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    log = tmp_path / "decisions.jsonl"
    monkeypatch.setenv(VARIABLE, str(log))
    # A divisor that spreads the small confidences of a random head over all shapes.
    config = {"method": "adaptivespec", "model": str(tiny_head), "tree": {"scope": scope}, "signal": {"divisor": 0.2}}
    llm = make_llm(speculative_config=config)
    generate(llm, random_prompts(5, seed=81), greedy(40))
    events = read_log(log)
    chosen = [event for event in events if event["call"] == "bounds"]
    assert len(chosen) > 20
    assert len({tuple(shape) for event in chosen for shape in event["result"]["shapes"]}) > 1
    settings = runner_of(llm).settings
    assert replay(events, settings) == []
    index = events.index(chosen[0])
    chosen[0]["result"]["shapes"][0] = [9, 9, 9]
    assert [mismatch.index for mismatch in replay(events, settings)] == [index]


def test_no_log_unless_asked_for(trees: Any) -> None:
    assert runner_of(trees).decision_log is None


def test_reference_ops_decode_the_same(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain-torch ops in the place of the native ones, on the whole engine."""
    monkeypatch.setattr(_native, "_by_device", {})
    prompts = random_prompts(4, seed=82)
    expected = generate(plain, prompts, greedy(40))
    llm = make_llm(speculative_config=adaptivespec(tiny_head))
    drafts = Oracle(runner_of(llm), truth_of(prompts, expected))
    llm.collective_rpc("adaptivespec_stats")
    try:
        assert generate(llm, prompts, greedy(40)) == expected
    finally:
        drafts.remove()
    assert llm.collective_rpc("adaptivespec_stats")[0]["accepted"] > 20
    assert generate(llm, prompts, greedy(40)) == expected
