"""What must hold between and within steps, checked where ``VLLM_ADAPTIVESPEC_CHECK=1`` asks for it.

Each rule is a generator of faults, in words. The first fault ends the engine with an :class:`IntegrityError`: state
that contradicts itself would show as wrong text much later. Nothing is computed when the checks are off.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.engine.v1.stats import WorkerStats
from adaptivespec_vllm.types import DraftTree, RequestSignal, VerifyResult

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v1.first_pass import Rows
    from adaptivespec_vllm.engine.v1.runner import TreeModelRunner
    from adaptivespec_vllm.engine.v1.step import Step

VARIABLE = "VLLM_ADAPTIVESPEC_CHECK"


class IntegrityError(RuntimeError):
    """Trees, slots, counters or what is kept of requests contradict each other: a fault of this package."""


def wanted() -> bool:
    """Whether the environment asks for the checks."""
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ConfigError(f"{VARIABLE}: got {value!r}; allowed: '0' or '1'")
    return value == "1"


def check_integrity(runner: TreeModelRunner) -> None:
    """Raise for the first fault: of the step, once its walk is done and before its commit; of the rest at any time.

    Raises:
        IntegrityError: with the request and the numbers that disagree.

    """
    for fault in _faults(runner):
        raise IntegrityError(f"adaptivespec: {fault}")


def _faults(runner: TreeModelRunner) -> Iterator[str]:
    step = runner.step
    if step is not None and step.result is not None:
        yield from tree_faults(runner.input_batch.req_ids, step.trees, step.drafted, runner.num_spec_tokens)
        yield from verdict_faults(step.trees, step.result, [margin is None for margin in runner.margins()])
        yield from slot_faults(step, runner)
    if step is None:
        yield from pending_faults(runner.pending, runner.requests)
    yield from backlog_faults(runner.drafter.backlog.parts, runner.requests)
    yield from signal_faults(runner.policy.signals, runner.requests)
    for stats in (runner.stats, runner.totals):
        yield from counter_faults(stats)


def tree_faults(
    requests: Sequence[str], trees: Sequence[DraftTree], drafted_now: Sequence[bool], most_nodes: int
) -> Iterator[str]:
    """Parents come first, siblings differ, and a tree is no larger than what was asked for."""
    for request, tree, drafted in zip(requests, trees, drafted_now, strict=True):
        parents, name = tree.parents, f"tree of request {request}"
        if len(parents) != len(tree) or not all(0 <= parent < row for row, parent in enumerate(parents, start=1)):
            yield f"{name}: a node comes before its parent: parents {parents}"
            continue
        if len(set(zip(parents, tree.tokens, strict=True))) < len(tree):
            yield f"{name}: two children of a node hold the same token: parents {parents}"
        if len(tree) > most_nodes:
            yield f"{name}: {len(tree)} nodes, more than {most_nodes}"
        if drafted and len(tree):
            children = max(map(parents.count, set(parents)))
            size, bound = (max(tree.depths()), children, len(tree)), tree.shape
            if any(have > most for have, most in zip(size, bound, strict=True)):
                yield f"{name}: depth, children of a node and nodes are {size}, above its shape {tuple(bound)}"


def verdict_faults(trees: Sequence[DraftTree], result: VerifyResult, strict: Sequence[bool]) -> Iterator[str]:
    """An accepted path leads from the root downwards; a promotion is one of its nodes, and none where it is strict."""
    columns = zip(result.lengths.tolist(), result.paths.tolist(), result.promotions.tolist(), strict=True)
    nats = result.regrets.tolist()
    for tree, (length, path, promotions), regret, is_strict in zip(trees, columns, nats, strict, strict=True):
        above = 0
        for row in path[:length]:
            if not 1 <= row <= len(tree) or tree.parents[row - 1] != above:
                yield f"accepted path {path[:length]} does not follow parents {tree.parents}"
                break
            above = row
        if not 0 <= promotions <= length or (is_strict and promotions):
            yield f"{promotions} promotions on a path of {length} (strict: {is_strict})"
        if not (math.isfinite(regret) and regret >= 0.0) or (regret > 0.0 and not promotions):
            yield f"{regret} nats given up by {promotions} promotions"


def slot_faults(step: Step, runner: TreeModelRunner) -> Iterator[str]:
    """Draft rows have no slot during the forward pass; accepted ones go to their request's own slots, in order."""
    result = step.result
    assert result is not None
    requests = runner.input_batch.req_ids
    for group, table in enumerate(runner.input_batch.block_table.block_tables):
        masked, sequential = table.slot_mapping.gpu.tolist(), step.slots[group].tolist()
        taken: dict[int, str] = {}
        for b, (request, tree) in enumerate(zip(requests, step.trees, strict=True)):
            if not step.deferred[b]:
                continue
            root = int(step.root_rows[b])
            if any(slot != -1 for slot in masked[root + 1 : root + 1 + len(tree)]):
                yield f"request {request}: a draft row has a slot during the forward pass"
            blocks, size = runner.requests[request].block_ids[group], table.block_size
            for depth in range(int(result.lengths[b]) + 1):
                place, slot = tree.root_position + depth, sequential[root + depth]
                own = blocks[place // size] * size + place % size if place // size < len(blocks) else None
                if slot != own:
                    yield f"request {request}: position {place} has slot {slot}; its own is {own}"
                if slot in taken:
                    yield f"requests {taken[slot]} and {request} write slot {slot}"
                taken[slot] = request


def pending_faults(pending: Mapping[str, DraftTree], requests: Mapping[str, Any]) -> Iterator[str]:
    """Trees wait for live requests only, no further on than their last token."""
    yield from _dead("a tree", pending, requests)
    for request, tree in pending.items():
        if request in requests and len(tree) and tree.root_position >= requests[request].num_tokens:
            yield f"request {request}: tree at {tree.root_position}, of {requests[request].num_tokens} tokens"


def backlog_faults(backlog: Mapping[str, Sequence[Rows]], requests: Mapping[str, Any]) -> Iterator[str]:
    """Rows wait for live requests only, and follow one another."""
    yield from _dead("rows", backlog, requests)
    for request, parts in backlog.items():
        positions = [position for part in parts for position in part.positions.tolist()]
        if positions != [*range(positions[0], positions[0] + len(positions))]:
            yield f"request {request}: waiting rows have positions {positions}"


def signal_faults(signals: Mapping[str, RequestSignal], requests: Mapping[str, Any]) -> Iterator[str]:
    """The policy knows live requests only, and of them what is possible."""
    yield from _dead("a signal", signals, requests)
    for request, signal in signals.items():
        if not 0.0 <= signal.acceptance <= 1.0 or signal.misses < 0 or not signal.regret >= 0.0:
            yield f"request {request}: impossible signal {signal}"


def counter_faults(stats: WorkerStats) -> Iterator[str]:
    """Counters are not negative, and agree with each other."""
    values = stats.as_dict()
    flat = [value for v in values.values() for value in (v.values() if isinstance(v, dict) else [v])]
    sums = {
        "emitted = steps + accepted": stats.emitted == stats.steps + stats.accepted,
        "accepted <= drafted nodes": stats.accepted <= stats.drafted_nodes,
        "promotions <= accepted": stats.promotions <= stats.accepted,
        "plain steps <= steps": stats.plain_engine_steps <= stats.engine_steps,
        "lengths": (stats.lengths.total(), _sum(stats.lengths)) == (stats.steps, stats.emitted),
        "depths reached": stats.accepted_at_depth.total() == stats.accepted,
        "trees": stats.nodes.total() == stats.depths.total() == stats.widths.total() <= stats.steps,
        "nodes": _sum(stats.nodes) == stats.drafted_nodes,
        "depth": _sum(stats.depths) == stats.drafted_depth,
        "width": _sum(stats.widths) == stats.drafted_width,
        "not negative": all(value >= 0 for value in flat),
    }
    yield from (f"counters: {name} does not hold: {values}" for name, holds in sums.items() if not holds)


def _sum(histogram: Mapping[int, int]) -> int:
    return sum(value * times for value, times in histogram.items())


def _dead(what: str, kept: Mapping[str, Any], requests: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{what} of request {request}, which has ended" for request in kept if request not in requests)
