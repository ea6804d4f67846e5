"""The checks find what is broken: each rule is broken once in the state of a real engine, in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.engine.v1 import integrity
from adaptivespec_vllm.engine.v1.first_pass import Rows
from adaptivespec_vllm.types import DraftTree, RequestSignal
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, truth_of
from tests.e2e.oracle import Oracle, runner_of

Break = Callable[[Any, int], None]


def set_tree(**changes: Any) -> Break:
    """Another tree for a request of the step."""

    def apply(runner: Any, b: int) -> None:
        tree = runner.step.trees[b]
        runner.step.trees[b] = replace(tree, **{k: f(getattr(tree, k)) for k, f in changes.items()})

    return apply


def set_result(name: str, value: Any) -> Break:
    def apply(runner: Any, b: int) -> None:
        column = getattr(runner.step.result, name).clone()
        column[b] = value
        setattr(runner.step.result, name, column)

    return apply


def give_a_slot(runner: Any, b: int) -> None:
    table = runner.input_batch.block_table.block_tables[0]
    table.slot_mapping.gpu[int(runner.step.root_rows[b]) + 1] = 0


def swap_slots(runner: Any, b: int) -> None:
    root = int(runner.step.root_rows[b])
    slots = runner.step.slots[0].clone()
    slots[root], slots[root + 1] = slots[root + 1].clone(), slots[root].clone()
    runner.step.slots[0] = slots


def write_anothers_slots(runner: Any, b: int) -> None:
    """Two requests with the same blocks."""
    one, other = runner.input_batch.req_ids[:2]
    tree = runner.step.trees
    runner.requests[one].block_ids = runner.requests[other].block_ids
    tree[0] = replace(tree[0], root_position=tree[1].root_position)
    slots = runner.step.slots[0].clone()
    roots = [int(row) for row in runner.step.root_rows[:2]]
    slots[roots[0]] = slots[roots[1]]
    runner.step.slots[0] = slots
    result = runner.step.result
    runner.step.result = replace(result, lengths=torch.zeros_like(result.lengths))


def keep(where: str, value: Any, request: str = "ended") -> Break:
    def apply(runner: Any, b: int) -> None:
        kept = {"backlog": runner.drafter.backlog.parts, "signals": runner.policy.signals}[where]
        kept[request if request == "ended" else runner.input_batch.req_ids[b]] = value

    return apply


def rows(*positions: int) -> Rows:
    return Rows(torch.zeros(len(positions)), torch.tensor(positions), torch.zeros(len(positions), 1))


def count(**values: Any) -> Break:
    def apply(runner: Any, b: int) -> None:
        for name, value in values.items():
            setattr(runner.totals, name, getattr(runner.totals, name) + value)

    return apply


def swapped(parents: list[int]) -> list[int]:
    return [1, *parents[1:]]


BREAKS: dict[str, tuple[str, Break]] = {
    "parent behind its child": ("a node comes before its parent", set_tree(parents=swapped)),
    "twins": (
        "two children of a node hold the same token",
        set_tree(tokens=lambda t: [t[0], t[0], *t[2:]], parents=lambda p: [0, 0, *p[2:]]),
    ),
    "deeper than asked for": ("above its shape", set_tree(shape=lambda s: s._replace(depth=0))),
    "wider than asked for": ("above its shape", set_tree(shape=lambda s: s._replace(width=0))),
    "larger than asked for": ("above its shape", set_tree(shape=lambda s: s._replace(nodes=1))),
    "path through the air": ("does not follow parents", set_result("paths", 63)),
    "promotion where it is strict": ("promotions on a path", set_result("promotions", 1)),
    "nats of no promotion": ("nats given up by 0 promotions", set_result("regrets", 1.0)),
    "nats that are no number": ("nats given up", set_result("regrets", float("nan"))),
    "draft row with a slot": ("a draft row has a slot", give_a_slot),
    "slots out of order": ("its own is", swap_slots),
    "slots of another request": ("write slot", write_anothers_slots),
    "signal of an ended request": ("a signal of request ended", keep("signals", RequestSignal(0.5))),
    "impossible signal": ("impossible signal", keep("signals", RequestSignal(1.5), "live")),
    "rows of an ended request": ("rows of request ended", keep("backlog", [rows(3, 4)])),
    "rows with a gap": ("waiting rows have positions [3, 4, 6]", keep("backlog", [rows(3, 4), rows(6)], "live")),
    "tokens from nowhere": ("emitted = steps + accepted", count(emitted=1)),
    "more accepted than drafted": ("accepted <= drafted nodes", count(accepted=9999, emitted=9999)),
    "promoted but not accepted": ("promotions <= accepted", count(promotions=9999)),
    "negative": ("not negative", count(regret=-9999.0)),
}


@contextmanager
def restored(runner: Any) -> Iterator[None]:
    """Everything that a break touches, as it was."""
    step, slot_mapping = runner.step, runner.input_batch.block_table.block_tables[0].slot_mapping.gpu
    trees, slots, result, mapping = list(step.trees), list(step.slots), step.result, slot_mapping.clone()
    fields = {name: getattr(result, name) for name in ("paths", "lengths", "promotions", "regrets")}
    parts, signals = dict(runner.drafter.backlog.parts), dict(runner.policy.signals)
    blocks = {request: state.block_ids for request, state in runner.requests.items()}
    totals = replace(runner.totals)
    try:
        yield
    finally:
        step.trees[:], step.slots[:], step.result = trees, slots, result
        for name, value in fields.items():
            setattr(result, name, value)
        slot_mapping.copy_(mapping)
        runner.drafter.backlog.parts = parts
        runner.policy.signals.clear()
        runner.policy.signals.update(signals)
        for request, state in runner.requests.items():
            state.block_ids = blocks[request]
        runner.totals = totals


@pytest.fixture(scope="module")
def found(make_llm: Callable[..., Any], tiny_head: Path, plain: Any) -> dict[str, list[str]]:
    """Faults by what was broken, of one step in which every request verifies a tree."""
    llm = make_llm(speculative_config=adaptivespec(tiny_head))
    runner = runner_of(llm)
    assert runner.checks, "tests/e2e/conftest.py turns the checks on"
    prompts = random_prompts(4, seed=97)
    truth = truth_of(prompts, generate(plain, prompts, greedy(40)))
    found: dict[str, list[str]] = {}
    commit = runner._commit

    def breaking(step: Any) -> None:
        b = next((b for b, n in enumerate(step.result.lengths.tolist()) if n and len(step.trees[b]) > 3), None)
        if not found and b is not None and step.has_trees and len(step.trees) > 1:
            assert list(integrity._faults(runner)) == []
            for name, (_, apply) in BREAKS.items():
                with restored(runner):
                    apply(runner, b)
                    found[name] = list(integrity._faults(runner))
            integrity.check_integrity(runner)
        commit(step)

    drafts = Oracle(runner, truth, max_nodes=10)
    runner._commit = breaking
    try:
        assert generate(llm, prompts, greedy(40)) == [truth[tuple(p["prompt_token_ids"])] for p in prompts]
    finally:
        runner._commit = commit
        drafts.remove()
    found["runner"] = [runner]  # type: ignore[list-item]
    return found


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_found(found: dict[str, list[str]], name: str) -> None:
    expected, _ = BREAKS[name]
    assert [fault for fault in found[name] if expected in fault], found[name]


def test_trees_of_ended_requests_are_found(found: dict[str, Any]) -> None:
    (runner,) = found["runner"]
    assert runner.step is None
    runner.pending["ended"] = DraftTree([3], [0], 5)
    try:
        with pytest.raises(integrity.IntegrityError, match="a tree of request ended, which has ended"):
            integrity.check_integrity(runner)
    finally:
        del runner.pending["ended"]
    integrity.check_integrity(runner)


def test_a_tree_behind_the_last_token_is_found(found: dict[str, Any]) -> None:
    (runner,) = found["runner"]
    request, state = next(iter(runner.requests.items()))
    faults = integrity.pending_faults({request: DraftTree([3], [0], state.num_tokens)}, runner.requests)
    assert "tree at" in next(faults)
    assert not list(integrity.pending_faults({request: DraftTree([3], [0], state.num_tokens - 1)}, runner.requests))


def test_a_fault_ends_the_step(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not go on with state that contradicts itself."""
    (runner,) = found["runner"]
    monkeypatch.setitem(runner.policy.signals, "ended", RequestSignal(0.5))
    from vllm.v1.outputs import ModelRunnerOutput

    with pytest.raises(integrity.IntegrityError, match="adaptivespec: a signal of request ended"):
        runner._with_counts(ModelRunnerOutput([], {}))


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, on in (("0", False), ("1", True)):
        monkeypatch.setenv(integrity.VARIABLE, value)
        assert integrity.wanted() is on
    monkeypatch.delenv(integrity.VARIABLE)
    assert not integrity.wanted()
    monkeypatch.setenv(integrity.VARIABLE, "yes")
    with pytest.raises(ConfigError, match="VLLM_ADAPTIVESPEC_CHECK: got 'yes'; allowed: '0' or '1'"):
        integrity.wanted()
