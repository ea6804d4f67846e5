"""The demo's figures: what is counted, what is compared, and how it is shown."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from adaptivespec_vllm.demo.arms import ARMS, choose
from adaptivespec_vllm.demo.decode import Answer
from adaptivespec_vllm.demo.errors import DemoError
from adaptivespec_vllm.demo.prompts import PROMPTS, Prompt
from adaptivespec_vllm.demo.report import ROOMY, as_json, by_kind, figures, first_difference, table

PAIR = (Prompt("math", "1 + 1?"), Prompt("code", "print?"))


def answer(tokens: list[int], steps: int, seconds: float, engine: dict[str, object] | None = None) -> Answer:
    return Answer("", tokens, steps, prefill_seconds=0.5, decode_seconds=seconds, engine=engine or {})


def plain() -> list[Answer]:
    return [answer([1, 2, 3, 4, 5], 4, 2.0), answer([1, 2, 3], 2, 1.0)]


def test_prefill_counts_neither_as_token_nor_as_time() -> None:
    row = figures(ARMS["plain"], PAIR, {"plain": plain()})
    assert row.tokens_per_second == pytest.approx(6 / 3.0)
    assert row.accepted_length == pytest.approx(1.0)
    assert row.ratio == pytest.approx(1.0)
    assert row.tokens == 8


def test_ratio_is_of_pooled_speeds_and_by_kind() -> None:
    stock = [answer([1, 2, 3, 4, 5], 2, 0.5), answer([1, 2, 3], 2, 2.0)]
    row = figures(ARMS["stock"], PAIR, {"plain": plain(), "stock": stock})
    assert row.ratio == pytest.approx((6 / 2.5) / (6 / 3.0))
    assert row.accepted_length == pytest.approx(6 / 4)
    assert row.ratio_by_kind == pytest.approx({"math": 4.0, "code": 0.5})
    assert (row.depth, row.width, row.nodes, row.promoted) == (2.0, 1.0, 2.0, None)
    assert by_kind([row]) == "math 4.00x; code 0.50x"


def test_what_was_drafted_comes_from_the_engine() -> None:
    counters = {"steps": 4, "drafted_depth": 12, "drafted_width": 16, "drafted_nodes": 10, "promotions": 3}
    own = [
        answer([1, 2, 3, 4, 5], 2, 1.0, counters | {"regret": 1.5, "chains": {"cut": 1}, "seconds": {"target": 0.5}}),
        answer([1, 2, 9], 1, 1.0, counters | {"regret": 0.5, "chains": {}, "seconds": {"target": 0.25}}),
    ]
    row = figures(ARMS["margin"], PAIR, {"plain": plain(), "margin": own})
    assert (row.depth, row.width, row.nodes) == (3.0, 4.0, 2.5)
    assert (row.promoted, row.regret_nats) == (6, 2.0)
    assert row.engine_seconds == {"target": 0.75}
    assert (row.same_text, row.first_differences) == (1, [None, 2])


def test_an_engine_without_counters_leaves_gaps() -> None:
    row = figures(ARMS["strict"], PAIR, {"strict": plain()})
    assert (row.depth, row.nodes, row.promoted, row.ratio, row.same_text) == (None, None, None, None, None)


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [], None), ([], [7], 0)],
)
def test_first_difference(ours: list[int], theirs: list[int], place: int | None) -> None:
    assert first_difference(ours, theirs) == place


@pytest.mark.parametrize("columns", [80, ROOMY, 140])
def test_the_table_fits_and_says_whether_the_text_is_the_same(columns: int) -> None:
    answers = {name: plain() for name in ARMS}
    answers["strict"] = [answer([1, 2, 3, 4, 6], 2, 1.0, {"steps": 2, "drafted_nodes": 6}), answer([1, 2, 3], 1, 1.0)]
    rows = [figures(arm, PAIR, answers) for arm in ARMS.values()]
    console = Console(width=columns, record=True)
    console.print(table(rows, console.width))
    lines = console.export_text().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    said = {line.split("  ")[0].strip(): line for line in lines}
    assert said["EAGLE-3 chain of 2"].rstrip().endswith("yes (2 of 2)")
    assert said["AdaptiveSpec strict"].rstrip().endswith("no (1 of 2)")
    assert "3.0" in said["AdaptiveSpec strict"]
    assert "…" not in "".join(lines)


def test_the_json_report_holds_every_answer_and_survives_a_round_trip() -> None:
    answers = {"plain": plain()}
    rows = [figures(ARMS["plain"], PAIR, answers)]
    report = json.loads(json.dumps(as_json(rows, PAIR, answers, {"decoding": 1.0}, {"commit": "abc"})))
    assert report["provenance"] == {"commit": "abc"}
    assert [entry["kind"] for entry in report["answers"]] == ["math", "code"]
    assert report["answers"][0]["arms"]["plain"]["tokens"] == [1, 2, 3, 4, 5]
    assert report["arms"][0]["arm"] == "plain"


def test_arms_are_chosen_once_each_in_the_order_asked_for() -> None:
    assert [arm.name for arm in choose("margin, plain,margin")] == ["margin", "plain"]
    for wrong in ("", "plain,fast"):
        with pytest.raises(DemoError, match="--arms"):
            choose(wrong)


def test_only_the_margin_arm_is_lossy() -> None:
    assert [name for name, arm in ARMS.items() if not arm.lossless] == ["margin"]
    assert "margin" not in (ARMS["strict"].speculative or {})


def test_prompts_cover_each_kind_alike() -> None:
    kinds = [prompt.kind for prompt in PROMPTS]
    assert {kind: kinds.count(kind) for kind in kinds} == {"math": 3, "code": 3, "chat": 3}
