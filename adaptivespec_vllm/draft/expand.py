"""Grow the trees of a batch, one level of every request at a time.

The first level comes from the head's pass over the accepted tokens (true hidden states of the target). Each further
level is one call of the head over the chosen nodes of all requests that still grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft.pool import ROOT, CandidatePool
from adaptivespec_vllm.types import DraftTree, TreeShape


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

    def level(self, rows: LevelRows) -> torch.Tensor:
        """Run the head over the nodes of a level and return their logits ``[R, draft vocabulary]``."""

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Map ids of the draft vocabulary to token ids of the target."""


@dataclass(slots=True)
class _Growth:
    """One growing tree: its candidates, and the scratch rows of its expanded nodes."""

    pool: CandidatePool
    frontier: np.ndarray
    scratch_of: dict[int, int]
    ancestors: list[int]
    level_row: dict[int, int]


def scratch_rows_needed(shapes: Sequence[TreeShape]) -> int:
    """Expanded nodes that the largest of the shapes can hold: every level but the last, at most ``width`` each."""
    return max((min(s.width, s.nodes) * (s.depth - 1) for s in shapes if s.nodes), default=0)


def expand_trees(
    head: DraftHead,
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    shapes: Sequence[TreeShape],
    root_positions: Sequence[int],
    min_path_probability: float,
) -> list[DraftTree]:
    """Draft one tree a request.

    Args:
        head: the draft head, its first pass done.
        log_probs: ``float32 [B, k]`` draft log-probabilities of the k best children of each root, descending.
        tokens: ``int64 [B, k]`` their token ids (of the target's vocabulary).
        shapes: bounds per request; ``nodes == 0`` drafts nothing.
        root_positions: absolute position of each root.
        min_path_probability: nodes whose path probability is below it are dropped.

    Returns:
        The trees, in the order of the requests.

    """
    min_value = math.log(min_path_probability) if min_path_probability > 0 else -math.inf
    first_values, first_tokens = log_probs.numpy(), tokens.numpy()
    growths: list[_Growth | None] = []
    for b, shape in enumerate(shapes):
        if shape.nodes == 0 or shape.depth == 0:
            growths.append(None)
            continue
        pool = CandidatePool(shape, min_value)
        frontier = pool.add_level(first_values[b : b + 1], first_tokens[b : b + 1], np.array([ROOT]))
        growths.append(_Growth(pool, frontier, {}, [], {ROOT: b}))

    width = max((s.width for s in shapes), default=0)
    while any(growth is not None and len(growth.frontier) for growth in growths):
        rows = _next_level(growths, root_positions)
        draft_values, draft_ids = ops.topk_logprobs(head.level(rows), width)
        values, ids = draft_values.numpy(), head.to_target(draft_ids).numpy()
        start = rows.start.tolist()
        for growth, first, end in zip(growths, start[:-1], start[1:], strict=True):
            if growth is not None and end > first:
                growth.level_row = {node: first + i for i, node in enumerate(growth.frontier.tolist())}
                growth.frontier = growth.pool.add_level(values[first:end], ids[first:end], growth.frontier)

    confidences = np.exp(first_values[:, 0]).tolist() if len(shapes) else []
    return [
        DraftTree([], [], position, confidence, shape) if growth is None else growth.pool.tree(position, confidence)
        for growth, shape, position, confidence in zip(growths, shapes, root_positions, confidences, strict=True)
    ]


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
