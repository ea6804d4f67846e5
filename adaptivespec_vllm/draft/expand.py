"""Grow the trees of a batch, one level of every request at a time.

The first level comes from the head's pass over the accepted tokens (true hidden states of the target). Each further
level is one call of the head over the chosen nodes of all requests that still grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from adaptivespec_vllm.draft.pool import ROOT, CandidatePool
from adaptivespec_vllm.types import DraftTree, TreeShape

_NONE = np.empty(0, dtype=np.float32)


@dataclass(slots=True)
class LevelRows:
    """The nodes of one level that the head runs over; R rows, grouped by request.

    Attributes:
        tokens: ``int64 [R]``, token ids of the nodes.
        parent_rows: ``int64 [R]``, for each node the row of the previous call (level 2: the request's own row of
            the first pass) whose hidden state it continues.
        positions: ``int64 [R]``, position of the node for the head (one less than its place in the sequence).
        start: ``int32 [B + 1]``, first row of each request.
        scratch_rows: ``int64 [R]``, where each node's own key and value go in its request's scratch.
        ancestors: ``int64 [R]``, bit j set: scratch row j of the same request is an ancestor or the node itself.

    """

    tokens: torch.Tensor
    parent_rows: torch.Tensor
    positions: torch.Tensor
    start: torch.Tensor
    scratch_rows: torch.Tensor
    ancestors: torch.Tensor


class DraftHead(Protocol):
    """What the expansion needs of a head."""

    def children(self, rows: LevelRows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over the nodes of a level; the best children of each, as the first level of the trees is given.

        Args:
            rows: R nodes.
            width: how many children of each are asked for, at most.

        Returns:
            ``float32 [R, k]`` log-probabilities, descending, and ``int64 [R, k]`` token ids of the target.

        """


class Steering(Protocol):
    """What the expansion asks a policy; shapes as in ``policy.base.Drafting``."""

    beam: int | None
    """Nodes that are expanded at most, on one level or on all of them; None is the width of the shape on each level."""

    def values(self, log_probs: np.ndarray, owners: np.ndarray, depth: int) -> np.ndarray:
        """What each candidate of a level is worth given its parent."""

    def expand(self, frontiers: Sequence[np.ndarray], candidates: Sequence[np.ndarray]) -> list[int]:
        """How many of each request's frontier nodes to expand."""

    def keep(self, candidates: Sequence[np.ndarray]) -> list[int]:
        """How many of each request's candidates to keep."""


Expandable = Callable[[int, Sequence[int], np.ndarray], np.ndarray]
"""(request, rows of the previous call that hold the parents, tokens) of the N nodes of a frontier -> ``bool [N]``."""


@dataclass(slots=True)
class _Growth:
    """One growing tree: its candidates, and the scratch rows of its expanded nodes."""

    pool: CandidatePool
    level_row: dict[int, int]
    frontier: np.ndarray = field(default_factory=lambda: np.array([ROOT]))
    scratch_of: dict[int, int] = field(default_factory=dict)
    ancestors: list[int] = field(default_factory=list)


def scratch_rows_needed(shapes: Sequence[TreeShape], beam: int | None = None) -> int:
    """Expanded nodes that the largest of the shapes can hold: every level but the last, at most ``width`` each, or with
    a beam at most so many in all."""
    if beam is not None:
        return max((min(beam, beam * (s.depth - 1)) for s in shapes if s.nodes), default=0)
    return max((min(s.width, s.nodes) * (s.depth - 1) for s in shapes if s.nodes), default=0)


def expand_trees(
    head: DraftHead,
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    shapes: Sequence[TreeShape],
    root_positions: Sequence[int],
    steering: Steering,
    expandable: Expandable | None = None,
) -> list[DraftTree]:
    """Draft one tree a request.

    Args:
        head: the draft head, its first pass done.
        log_probs: ``float32 [B, k]`` draft log-probabilities of the k best children of each root, descending.
        tokens: ``int64 [B, k]`` their token ids (of the target's vocabulary).
        shapes: bounds per request; ``nodes == 0`` drafts nothing, and its rows of ``log_probs`` are not looked at.
        root_positions: absolute position of each root.
        steering: what candidates are worth, and how many are expanded and kept.
        expandable: which nodes the head can be run over; None is all.

    Returns:
        The trees, in the order of the requests.

    """
    growths = [
        _Growth(CandidatePool(shape, steering.beam), {ROOT: b}) if shape.nodes and shape.depth else None
        for b, shape in enumerate(shapes)
    ]
    width = max((s.width for s in shapes), default=0)
    first_values, level_tokens = log_probs.numpy(), tokens.numpy()
    growing = np.array([b for b, growth in enumerate(growths) if growth is not None], dtype=np.int64)
    if len(growing):
        _add_level(growths, first_values[growing], level_tokens[growing], growing, steering, depth=1)
    for depth in range(2, max((s.depth for s in shapes), default=0) + 1):
        if expandable is not None:
            _restrict(growths, expandable)
        _narrow(growths, steering)
        counts = [0 if growth is None else len(growth.frontier) for growth in growths]
        if not any(counts):
            break
        rows = _next_level(growths, root_positions)
        values, children = head.children(rows, width)
        owners = np.repeat(np.arange(len(growths)), counts)
        _add_level(growths, values.numpy(), children.numpy(), owners, steering, depth)

    kept = steering.keep([_NONE if growth is None else growth.pool.values_of(growth.pool.ranked) for growth in growths])
    return [
        DraftTree([], [], position)
        if growth is None
        else growth.pool.tree(nodes, position, confidence=float(np.exp(first[0])))
        for growth, nodes, first, position in zip(growths, kept, first_values, root_positions, strict=True)
    ]


def _add_level(
    growths: Sequence[_Growth | None],
    log_probs: np.ndarray,
    tokens: np.ndarray,
    owners: np.ndarray,
    steering: Steering,
    depth: int,
) -> None:
    """Give each tree the children of its frontier nodes: rows ``[R, k]``, grouped by request (``owners [R]``)."""
    values = steering.values(log_probs, owners, depth)
    ends = np.searchsorted(owners, np.arange(len(growths)), side="right").tolist()
    for growth, first, end in zip(growths, [0, *ends], ends, strict=False):
        if growth is None:
            continue
        if end == first:
            growth.frontier = growth.frontier[:0]
            continue
        if depth > 1:
            growth.level_row = {node: first + i for i, node in enumerate(growth.frontier.tolist())}
        rows = slice(first, end)
        growth.frontier = growth.pool.add_level(values[rows], log_probs[rows], tokens[rows], growth.frontier)


def _restrict(growths: Sequence[_Growth | None], expandable: Expandable) -> None:
    """Leave nodes out of the frontiers that the head cannot be run over."""
    for b, growth in enumerate(growths):
        if growth is not None and len(growth.frontier):
            pool, nodes = growth.pool, growth.frontier
            parent_rows = [growth.level_row[parent] for parent in pool.parents_of(nodes).tolist()]
            growth.frontier = nodes[expandable(b, parent_rows, pool.tokens_of(nodes))]


def _narrow(growths: Sequence[_Growth | None], steering: Steering) -> None:
    """Cut each frontier to the nodes that are expanded."""
    if not any(growth is not None and len(growth.frontier) for growth in growths):
        return
    pools = [
        (_NONE, _NONE) if g is None else (g.pool.values_of(g.frontier), g.pool.values_of(g.pool.ranked))
        for g in growths
    ]
    counts = steering.expand([frontier for frontier, _ in pools], [candidates for _, candidates in pools])
    for growth, count in zip(growths, counts, strict=True):
        if growth is not None:
            growth.frontier = growth.frontier[:count]


def _next_level(growths: Sequence[_Growth | None], root_positions: Sequence[int]) -> LevelRows:
    """The frontier nodes of all requests, as rows for the head."""
    tokens: list[int] = []
    parent_rows: list[int] = []
    positions: list[int] = []
    scratch_rows: list[int] = []
    ancestors: list[int] = []
    start = [0]
    for growth, root_position in zip(growths, root_positions, strict=True):
        if growth is not None and len(growth.frontier):
            pool, nodes = growth.pool, growth.frontier
            tokens += pool.tokens_of(nodes).tolist()
            for node, parent in zip(nodes.tolist(), pool.parents_of(nodes).tolist(), strict=True):
                row = len(growth.ancestors)
                growth.scratch_of[node] = row
                mask = 1 << row
                if parent != ROOT:
                    mask |= growth.ancestors[growth.scratch_of[parent]]
                growth.ancestors.append(mask)
                scratch_rows.append(row)
                ancestors.append(mask if mask < 1 << 63 else mask - (1 << 64))
                parent_rows.append(growth.level_row[parent])
            positions += [root_position + pool.depth - 1] * len(nodes)
        start.append(len(tokens))
    return LevelRows(
        tokens=torch.tensor(tokens),
        parent_rows=torch.tensor(parent_rows),
        positions=torch.tensor(positions),
        start=torch.tensor(start, dtype=torch.int32),
        scratch_rows=torch.tensor(scratch_rows),
        ancestors=torch.tensor(ancestors),
    )
