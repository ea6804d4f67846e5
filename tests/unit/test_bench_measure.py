"""Arms take turns; times and counts begin behind the prefill."""

from __future__ import annotations

import time
from typing import Any

import pytest

from adaptivespec_vllm.bench import measure
from adaptivespec_vllm.bench.prompts import Encoded
from adaptivespec_vllm.bench.result import Place, Result
from tests.unit.bench_engines import TEXT, engine

PROMPTS = [Encoded(name, "math", (1, 2, 3)) for name in "ab"]
PLACE = Place(batch=2, context=None)


def parameters(number: int, tokens: int) -> int:
    return tokens


def test_a_batch_is_decoded_and_counted_behind_its_prefill() -> None:
    decoded = measure.decode(engine("default", 3), PROMPTS, 8, parameters)
    assert decoded.texts == [TEXT[:8]] * 2
    # After the first token of each: 3 + 3 + 1 tokens of two requests.
    assert (decoded.engine_steps, decoded.steps, decoded.emitted) == (3, 6, 14)
    assert decoded.reached() == [4, 4]  # of 6 steps, 4 emitted three tokens: two accepted drafts and one of the target
    assert decoded.counters["steps"] == 6  # the prefill's were thrown away


def test_prefill_is_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def tick() -> None:
        clock[0] += 1.0 if clock[0] else 10.0

    decoded = measure.decode(engine("plain", 1, on_step=tick), PROMPTS, 6, parameters)
    assert (decoded.prefill_seconds, decoded.seconds) == (10.0, 5.0)
    assert decoded.counters == {"seconds": {"execute/target": 5.0}}  # the stopwatch of an arm that is not ours


def test_what_is_cached_of_earlier_turns_does_not_help() -> None:
    own = engine("default", 2)
    for _ in range(2):
        measure.decode(own, PROMPTS, 4, parameters)
    assert own.llm.resets == 2


def run(repeats: int = 2, **texts: list[int]) -> tuple[Result, list[str]]:
    order: list[str] = []
    chunks = {"plain": 1, "stock:1": 2, "default": 3}
    engines = [engine(name, chunk, text=texts.get(name, TEXT)) for name, chunk in chunks.items()]
    result = Result(provenance={}, settings={}, arms=[one.info for one in engines])
    plan = {PLACE: [PROMPTS, PROMPTS[::-1]]}
    measure.run(result, engines, plan, tokens=8, repeats=repeats, parameters=parameters, tick=order.append)
    return result, order


def test_every_arm_decodes_a_batch_before_the_next_one_and_the_order_rotates() -> None:
    result, order = run()
    a, b, c = "plain", "stock:1", "default"
    assert order == [a, b, c, b, c, a, c, a, b, a, b, c]
    turns = [(sample.round, sample.group) for sample in result.samples[::3]]
    assert turns == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [sample.prompts for sample in result.samples[::3]] == [["a", "b"], ["b", "a"]] * 2


def test_what_a_turn_records() -> None:
    result, _ = run(repeats=1)
    samples = {sample.arm: sample for sample in result.samples if sample.group == 0}
    ours, plain, stock = samples["default"], samples["plain"], samples["stock:1"]
    assert ours.drafted == {"nodes": 18, "depth": 12, "width": 6, "steps": 6} and ours.promotions == 6
    assert ours.sections == {"verify": pytest.approx(0.006)}
    assert (plain.drafted, plain.promotions, stock.promotions) == ({}, None, None)
    assert set(stock.sections) == {"execute/target"}
    assert [samples[name].emitted for name in ("plain", "stock:1", "default")] == [14, 14, 14]
    assert ours.prompt_tokens == 6 and ours.kind == "math"


def test_texts_are_held_against_plain_decoding_of_the_same_turn() -> None:
    other = [*TEXT[:7], 5]
    result, _ = run(repeats=1, **{"stock:1": other})
    assert {sample.arm: sample.same_text for sample in result.samples} == {"plain": 2, "stock:1": 0, "default": 2}


def test_every_place_is_warmed_up_once_by_every_arm() -> None:
    engines = [engine("plain", 1), engine("default", 2)]
    result = Result(provenance={}, settings={})
    plan = {place: [PROMPTS] for place in (PLACE, Place(batch=1, context=64))}
    measure.run(result, engines, plan, tokens=4, repeats=3, parameters=parameters)
    assert [one.llm.resets for one in engines] == [2 * (1 + 3)] * 2
    assert len(result.samples) == 2 * 3 * 2


def test_seeds_are_the_same_for_every_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    drawn: Any = measure.sampling(0.7, 5)
    assert [drawn(number, 9).seed for number in (0, 1)] == [5, 6]
    greedy: Any = measure.sampling(0.0, 5, detokenize=False)(0, 9)
    assert (greedy.seed, greedy.max_tokens, greedy.detokenize) == (None, 9, False)
