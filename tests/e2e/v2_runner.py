"""What there is on the V2 model runner alone; collected by ``test_v2.py``, in a process of its own."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.engine.v1.integrity import IntegrityError
from adaptivespec_vllm.engine.v2 import integrity
from adaptivespec_vllm.types import RequestSignal
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, schedule_ahead, truth_of
from tests.e2e.oracle import decode_with_oracle, runner_of

TOKENS = 24


@contextmanager
def scheduled_drafts(llm: Any) -> Iterator[list[dict[str, int]]]:
    """Drafts that are planned meanwhile: a step each, by the number of the request among them."""
    runner = runner_of(llm)
    stock, steps = runner.execute_model, []
    numbers: dict[str, str] = {}

    def watch(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            numbers[new.req_id] = str(len(numbers))
        drafts = scheduler_output.scheduled_spec_decode_tokens
        steps.append({numbers[request]: len(tokens) for request, tokens in drafts.items()})
        return stock(scheduler_output, *args, **kwargs)

    runner.execute_model = watch
    try:
        yield steps
    finally:
        runner.execute_model = stock


@pytest.fixture(scope="module")
def prompts() -> list:
    return random_prompts(4, seed=91)


@pytest.fixture(scope="module")
def expected(plain: Any, prompts: list) -> list[list[int]]:
    return generate(plain, prompts, greedy(TOKENS))


def test_the_runner_is_v2(trees: Any) -> None:
    from adaptivespec_vllm.engine.v2.runner import TreeModelRunner

    assert isinstance(runner_of(trees), TreeModelRunner)


def test_asynchronous_scheduling(
    make_llm: Callable[..., Any], tiny_head: Path, prompts: list, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are scheduled before the one before them is known, so nobody but the worker knows the trees."""
    schedule_ahead(monkeypatch)
    llm = make_llm(speculative_config=adaptivespec(tiny_head))
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    assert type(llm.llm_engine.engine_core.engine_core.scheduler).__name__ == "AsyncScheduler"
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, expected), greedy(TOKENS))
    assert tokens == expected
    assert stats["accepted"] > 20
    assert generate(llm, prompts, greedy(TOKENS)) == expected


def test_width_one_drafts_what_vllm_drafts(
    make_llm: Callable[..., Any], tiny_head: Path, prompts: list, expected: list
) -> None:
    """Token for token, step for step, on the same runner."""
    chain = {"policy": "static", "shape": {"depth": 3, "width": 1, "nodes": 3}}
    ours = make_llm(speculative_config=adaptivespec(tiny_head, tree=chain))
    stock = make_llm(speculative_config={"method": "eagle3", "model": str(tiny_head), "num_speculative_tokens": 3})
    drafted = []
    for llm in (ours, stock):
        runner, seen = runner_of(llm), []
        propose = runner.speculator.propose

        def watch(*args: Any, propose: Any = propose, seen: list = seen, **kwargs: Any) -> Any:
            tokens = propose(*args, **kwargs)
            seen.append(tokens.tolist())
            return tokens

        runner.speculator.propose = watch
        assert generate(llm, prompts, greedy(TOKENS)) == expected
        drafted.append(seen)
    assert len(drafted[0]) > 10
    assert drafted[0][:-1] == drafted[1][:-1]  # the last trees are bounded by the end of the text


def test_adaptive_shapes_follow_the_step_before(
    make_llm: Callable[..., Any], tiny_head: Path, prompts: list, expected: list
) -> None:
    """Shapes shrink where nothing is accepted; with equal end shapes they are the static one."""
    low, high = {"depth": 2, "width": 3, "nodes": 3}, {"depth": 5, "width": 2, "nodes": 7}
    llm = make_llm(speculative_config=adaptivespec(tiny_head, tree={"policy": "adaptive", "low": low, "high": high}))
    llm.collective_rpc("adaptivespec_stats")
    with scheduled_drafts(llm) as scheduled:
        assert generate(llm, prompts, greedy(TOKENS)) == expected
    rows = [count for counts in scheduled for count in counts.values()]
    assert rows.count(3) > len(rows) / 2, "rows follow shapes"
    stats = llm.collective_rpc("adaptivespec_stats")[0]
    assert stats["breaker_trips"] > 0
    assert stats["nodes"].keys() <= set(range(1, 8))
    assert stats["nodes"][3] > stats["steps"] / 2, "a random head is no good: the low shape is due"
    generate(llm, prompts[:1], greedy(2))
    assert len(runner_of(llm).policy.signals) <= 1, "requests that have ended leave nothing behind"


def test_requests_change_their_own_trees(trees: Any, prompts: list, expected: list) -> None:
    """As many rows as each one asks for, and no others."""
    own = [{"max_nodes": 0}, {"max_nodes": 2}, {"shape": "2,2,5"}, {}]
    params = [greedy(TOKENS, extra_args={f"adaptivespec_{k}": v for k, v in keys.items()}) for keys in own]
    with scheduled_drafts(trees) as scheduled:
        assert generate(trees, prompts, params) == expected
    most = [max(counts.get(str(i), 0) for counts in scheduled) for i in range(len(prompts))]
    assert most == [0, 2, 5, 12]


def test_chains_where_logits_depend_on_drafts(trees: Any, plain: Any, prompts: list) -> None:
    params = greedy(TOKENS, repetition_penalty=1.3)
    expected = generate(plain, prompts, params)
    trees.collective_rpc("adaptivespec_stats")
    assert generate(trees, prompts, params) == expected
    stats = trees.collective_rpc("adaptivespec_stats")[0]
    assert set(stats["widths"]) == {1}


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"policy": "talon"}, "tree.policy='talon'"),
        (
            {
                "policy": "adaptive",
                "low": {"depth": 2, "width": 12, "nodes": 12},
                "high": {"depth": 7, "width": 2, "nodes": 8},
            },
            "72 expanded nodes",
        ),
    ],
)
def test_refusals(make_llm: Callable[..., Any], tiny_head: Path, tree: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_llm(speculative_config=adaptivespec(tiny_head, tree=tree))


def test_several_ranks_are_refused(make_llm: Callable[..., Any], tiny_head: Path) -> None:
    """Every rank would have to hear of a step when the first one does."""
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 on the V2 model runner"):
        make_llm(speculative_config=adaptivespec(tiny_head), tensor_parallel_size=2)


def test_check_names_the_runner() -> None:
    from adaptivespec_vllm.check.report import Report

    report = Report.gather(None, None)
    assert report.runner == {"name": "V2", "why": "VLLM_USE_V2_MODEL_RUNNER=1"}
    assert not report.errors


class _Waits(TorchDispatchMode):
    """Notes operations whose result the host has to wait for, with the place in this package that asked for them."""

    OPS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal")
    ON_CPUS_ONLY = ("cpu_attention", "v1/head", "v1/packed_head", "ops/", "integrity")

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        name = func.overloadpacket.__name__
        sized = name != "repeat_interleave" or (kwargs or {}).get("output_size") is not None
        if name in self.OPS or not sized:
            frame = sys._getframe(1)
            while frame is not None and "adaptivespec_vllm" not in frame.f_code.co_filename:
                frame = frame.f_back  # type: ignore[assignment]
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
            if frame and "site-packages" not in place and not any(part in place for part in self.ON_CPUS_ONLY):
                self.seen.add(f"{name} in {place}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["static", "cost-aware"])
def test_no_wait_in_a_step(
    make_llm: Callable[..., Any],
    tiny_head: Path,
    trees: Any,
    prompts: list,
    expected: list,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    """Nothing of ours reads a tensor on the host, by a method of tensors or by an operation of an unknown size."""
    llm = trees
    if policy == "cost-aware":
        llm = make_llm(speculative_config={"method": "adaptivespec", "model": str(tiny_head)})
    monkeypatch.setattr(runner_of(llm), "checks", False)
    mine = ("adaptivespec_vllm/engine/v2", "adaptivespec_vllm/draft/grid", "adaptivespec_vllm/kv", "verify/greedy")
    waits: list[str] = []
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__"):
        stock = getattr(torch.Tensor, name)

        def watched(tensor: Any, *args: Any, stock: Any = stock, name: str = name, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if any(part in caller for part in mine) and "cpu_attention" not in caller:
                waits.append(f"{name} in {caller}")
            return stock(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, watched)
    with _Waits() as operations:
        assert generate(llm, prompts, greedy(TOKENS)) == expected
    # The bound on sequence lengths is a tensor on the host to begin with.
    assert [wait for wait in waits if "numpy in" not in wait or "sampler" not in wait] == []
    assert operations.calls > 1000
    assert not operations.seen


def _give_a_slot(runner: Any, step: Any) -> None:
    step.slots[:, step.root_rows + 1] = 0


def _swap_slots(runner: Any, step: Any) -> None:
    roots = step.root_rows
    slots = step.sequential_slots.clone()
    slots[:, roots], slots[:, roots + 1] = step.sequential_slots[:, roots + 1], step.sequential_slots[:, roots]
    step.sequential_slots = slots


def _change(name: str, value: int, *, of: str, row: int = 1) -> Callable[[Any, Any], None]:
    """Another number in a row of the first tree, or of the first request."""

    def apply(runner: Any, step: Any) -> None:
        changed = getattr(getattr(step, of), name).clone()
        changed[row] = value
        setattr(step, of, replace(getattr(step, of), **{name: changed}))

    return apply


FAULTS: dict[str, tuple[str, Callable[[Any, Any], None]]] = {
    "parent behind its child": ("a node comes before its parent", _change("parents", 3, of="batch")),
    "wrong position": ("rows have positions", _change("positions", 0, of="batch", row=2)),
    "wrong ancestors": ("ancestors of rows", _change("ancestors", 0b1000, of="batch", row=2)),
    "path through the air": ("does not follow parents", _change("paths", 63, of="result", row=0)),
    "promotion where it is strict": ("promotions on a path", _change("promotions", 1, of="result", row=0)),
    "draft row with a slot": ("a draft row has a slot", _give_a_slot),
    "slots out of order": ("its own is", _swap_slots),
}


def test_checks_find_what_is_broken(trees: Any, prompts: list, expected: list) -> None:
    """Each rule is broken once, in the middle of a step of a real engine."""
    runner = runner_of(trees)
    assert runner.checks, "tests/e2e/conftest.py turns the checks on"
    found: dict[str, list[str]] = {}
    commit = runner._commit

    def breaking(step: Any) -> None:
        whole = integrity.trees_of(step)
        if not found and len(whole[0]) > 3 and int(step.result.lengths[0]):
            assert list(integrity.step_faults(runner, step)) == []
            for name, (_, apply) in FAULTS.items():
                kept = copy.copy(step)
                kept.slots = step.slots.clone()
                apply(runner, kept)
                found[name] = list(integrity.step_faults(runner, kept))
        commit(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_commit", breaking)
        tokens, _ = decode_with_oracle(trees, prompts, truth_of(prompts, expected), greedy(TOKENS))
    assert tokens == expected
    for name, (fault, _) in FAULTS.items():
        assert any(fault in told for told in found[name]), (name, found[name])
    runner.policy.signals["ended"] = RequestSignal(0.5)
    runner.speculator.backlog.waiting[3] = 99
    runner.totals.emitted += 1
    try:
        kept = list(integrity.kept_faults(runner))
        with pytest.raises(IntegrityError, match="a signal of request ended"):
            integrity.check_kept(runner)
    finally:
        del runner.policy.signals["ended"]
        runner.speculator.backlog.waiting[3] = 0
        runner.totals.emitted -= 1
    assert any("99 rows wait in slot 3" in fault for fault in kept)
    assert any("emitted = steps + accepted" in fault for fault in kept)
    integrity.check_kept(runner)
