"""The tests of the V1 model runner on V2, where every kernel runs in Triton's interpreter, and those of V2 alone.

They run in processes of their own, because vLLM looks for Triton when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
E2E = Path("tests/e2e")

CHECKS = [
    *(
        f"test_exactness.py::test_{name}"
        for name in (
            "batches[0-1]",
            "batches[0-10]",
            "without_the_commit_it_fails",
            "hidden_truths_are_accepted_whole",
            "own_drafts",
            "chunked_prefill_beside_trees",
            "preemption_and_resume",
            "second_turn_from_the_prefix_cache",
            "last_tokens_before_max_model_len[255]",
            "last_tokens_before_max_model_len[254]",
            "last_tokens_before_max_model_len[250]",
        )
    ),
    *(
        f"test_sampling.py::test_{name}"
        for name in (
            "mixed_batch",
            "seeds_do_not_depend_on_the_trees",
            "min_tokens[3]",
            "logprobs[raw_logprobs]",
            "logprobs[processed_logprobs]",
            "logprobs_of_chosen_tokens[raw_logprobs]",
            "seeded_request_does_not_disturb_others",
        )
    ),
    *(
        f"test_margin.py::test_{name}"
        for name in (
            "kappa_one_is_strict[0.0]",
            "promoted_tokens_keep_their_margin",
            "promotions_are_capped",
            "regret_budget",
            "a_tiny_kappa_accepts_whole_chains",
            "stop_tokens_are_never_promoted",
            "margin_at_temperature",
        )
    ),
    *(
        f"test_edges.py::test_{name}"
        for name in ("odd_shapes[shape0]", "odd_shapes[shape1]", "qwen3_target", "draft_vocabularies[512]")
    ),
    *(f"test_rules.py::test_every_decision_is_that_of_the_definition[{rule}]" for rule in ("mars", "typical", "fly")),
    "test_rules.py::test_a_margin_that_looks_ahead_takes_the_best_path",
    "test_rules.py::test_caps_and_guards_are_those_of_the_margin",
    "test_adapters.py::test_a_batch_of_mixed_adapters[greedy]",
    "test_structured_output.py::test_beside_requests_without_a_grammar[xgrammar]",
    *(
        f"v2_runner.py::test_{name}"
        for name in (
            "the_runner_is_v2",
            "asynchronous_scheduling",
            "width_one_drafts_what_vllm_drafts",
            "adaptive_shapes_follow_the_step_before",
            "requests_change_their_own_trees",
            "chains_where_logits_depend_on_drafts",
            "refusals[tree0-tree.policy='talon']",
            "refusals[tree1-72 expanded nodes]",
            "several_ranks_are_refused",
            "check_names_the_runner",
            "no_wait_in_a_step[static]",
            "no_wait_in_a_step[cost-aware]",
            "checks_find_what_is_broken",
        )
    ),
    *(
        f"v2_costs.py::test_{name}"
        for name in (
            "costs_are_measured_and_decide",
            "nothing_is_drafted_where_it_is_too_dear",
            "trees_follow_costs",
            "accepted_trees_give_the_text",
            "seeds_give_the_draws_of_plain_decoding",
            "rows_that_were_put_off_give_the_same_drafts",
            "rows_follow_plans_under_asynchronous_scheduling",
        )
    ),
]

AHEAD = [
    *(
        f"test_exactness.py::test_{name}"
        for name in (
            "batches[0-10]",
            "chunked_prefill_beside_trees",
            "preemption_and_resume",
            "last_tokens_before_max_model_len[254]",
        )
    ),
    "test_sampling.py::test_mixed_batch",
]
"""Once more with asynchronous scheduling."""


def run(checks: list[str], report: Path, **environment: str) -> dict[str, str]:
    """What went wrong, by check; those that passed have an empty text."""
    path = [str(ROOT), str(ROOT / E2E / "interpreter"), os.environ.get("PYTHONPATH", "")]
    environment |= {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--show-capture=no", f"--junitxml={report}"]
    command += [str(E2E / check) for check in checks]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert report.exists(), ended.stdout[-4000:] + ended.stderr[-4000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname'].rpartition('.')[2]}.py::{case.attrib['name']}"
        found[name] = "\n".join(problem.text or "" for problem in case)
    return found


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(CHECKS, tmp_path_factory.mktemp("v2") / "report.xml")


@pytest.fixture(scope="module")
def failures_ahead(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(AHEAD, tmp_path_factory.mktemp("v2") / "report.xml", TEST_ASYNC_SCHEDULING="1")


@pytest.mark.parametrize("check", CHECKS)
def test_on_v2(failures: dict[str, str], check: str) -> None:
    assert check in failures, "it was not run"
    assert not failures[check], failures[check]


@pytest.mark.parametrize("check", AHEAD)
def test_scheduled_ahead(failures_ahead: dict[str, str], check: str) -> None:
    assert check in failures_ahead, "it was not run"
    assert not failures_ahead[check], failures_ahead[check]
