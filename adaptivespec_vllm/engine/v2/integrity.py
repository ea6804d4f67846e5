"""What must hold in a step of the V2 runner, checked where ``VLLM_ADAPTIVESPEC_CHECK=1`` asks for it.

The checks read what is on the device, so a step waits for it: they are for tests and for finding faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from adaptivespec_vllm.engine.v1.integrity import (
    IntegrityError,
    counter_faults,
    signal_faults,
    tree_faults,
    verdict_faults,
)
from adaptivespec_vllm.engine.v2.backlog import MOST
from adaptivespec_vllm.types import DraftTree

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v2.runner import TreeModelRunner
    from adaptivespec_vllm.engine.v2.step import TreeStep


def check_step(runner: TreeModelRunner, step: TreeStep) -> None:
    """Raise for the first fault of a step whose walk is done and which is not committed yet.

    Raises:
        IntegrityError: with the request and the numbers that disagree.

    """
    _raise(step_faults(runner, step))


def check_kept(runner: TreeModelRunner) -> None:
    """Raise for the first fault in what is kept between steps.

    Raises:
        IntegrityError: with the request and the numbers that disagree.

    """
    _raise(kept_faults(runner))


def _raise(faults: Iterator[str]) -> None:
    for fault in faults:
        raise IntegrityError(f"adaptivespec: {fault}")


def step_faults(runner: TreeModelRunner, step: TreeStep) -> Iterator[str]:
    """Of trees, verdicts and slots."""
    if step.result is None:
        return
    trees = trees_of(step)
    strict = [True] * len(trees) if step.margins is None else (step.margins.max_log_ratio < 0).tolist()
    yield from tree_faults(step.requests, trees, [False] * len(trees), runner.num_speculative_steps)
    yield from ancestor_faults(step, trees)
    yield from verdict_faults(trees, step.result, strict)
    for group in range(len(runner.block_tables.block_sizes)):
        yield from slot_faults(runner, step, trees, group)


def trees_of(step: TreeStep) -> list[DraftTree]:
    """The trees of a step, up to the last node of each."""
    batch, trees = step.batch, []
    for first, end in zip(step.start[:-1].tolist(), step.start[1:].tolist(), strict=True):
        tokens = [token for token in batch.tokens[first + 1 : end].tolist() if token >= 0]
        parents = batch.parents[first + 1 : first + 1 + len(tokens)].tolist()
        trees.append(DraftTree(tokens, parents, int(batch.positions[first])))
    return trees


def ancestor_faults(step: TreeStep, trees: list[DraftTree]) -> Iterator[str]:
    """Positions and ancestor words say what parents say."""
    for request, first, tree in zip(step.requests, step.start[:-1].tolist(), trees, strict=True):
        depths, words = [0], [1]
        for row, parent in enumerate(tree.parents, start=1):
            if not 0 <= parent < row:
                return  # told of already
            depths.append(depths[parent] + 1)
            words.append(words[parent] | 1 << row)
        rows = slice(first, first + len(words))
        positions = [tree.root_position + depth for depth in depths]
        if step.batch.positions[rows].tolist() != positions:
            yield f"request {request}: rows have positions {step.batch.positions[rows].tolist()}, not {positions}"
        if [word % (1 << 64) for word in step.batch.ancestors[rows].tolist()] != words:
            yield f"request {request}: ancestors of rows do not follow parents {tree.parents}"


def slot_faults(runner: TreeModelRunner, step: TreeStep, trees: list[DraftTree], group: int) -> Iterator[str]:
    """Draft rows have no slot during the forward pass; accepted ones go to their request's own slots, in order."""
    assert step.result is not None
    assert step.slots is not None
    assert step.sequential_slots is not None
    masked, sequential = step.slots[group].tolist(), step.sequential_slots[group].tolist()
    tables, size = runner.block_tables.input_block_tables[group].tolist(), runner.block_tables.block_sizes[group]
    lengths, roots = step.result.lengths.tolist(), step.root_rows.tolist()
    taken: dict[int, str] = {}
    for b, (request, tree) in enumerate(zip(step.requests, trees, strict=True)):
        if not step.is_tree[b]:
            continue
        rows = int(step.start[b + 1] - step.start[b])
        if any(slot != -1 for slot in masked[roots[b] + 1 : roots[b] + rows]):
            yield f"request {request}: a draft row has a slot during the forward pass"
        for depth in range(lengths[b] + 1):
            place, slot = tree.root_position + depth, sequential[roots[b] + depth]
            own = tables[b][place // size] * size + place % size
            if slot != own:
                yield f"request {request}: position {place} has slot {slot}; its own is {own}"
            if slot in taken:
                yield f"requests {taken[slot]} and {request} write slot {slot}"
            taken[slot] = request


def kept_faults(runner: TreeModelRunner) -> Iterator[str]:
    """Of what is kept of requests, and of counters."""
    planner, backlog = runner.planner, runner.speculator.backlog
    alive = dict.fromkeys(planner.alive)
    yield from signal_faults(planner.policy.signals, alive)
    for slot, waiting in enumerate(backlog.waiting.tolist()):
        if not 0 <= waiting <= MOST:
            yield f"{waiting} rows wait in slot {slot}; allowed: 0 to {MOST}"
    if planner.forecast is not None:
        yield from (f"drafts of request {r}, which has ended" for r in planner.forecast.requests() if r not in alive)
    for stats in (runner.counted, runner.totals):
        yield from counter_faults(stats)
