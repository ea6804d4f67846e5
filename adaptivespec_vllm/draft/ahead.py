"""Trees drafted ahead on a device, in one go, and grown on the host afterwards from what was recorded.

Where each look at a number makes the host wait for the device, a level cannot be chosen by what the level before gave.
So the device drafts the widest trees there can be, always expanding the most likely nodes, without a wait; everything
it saw comes to the host in one copy; and :func:`~adaptivespec_vllm.draft.expand.expand_trees` grows the trees there,
steered by the policy as ever, with :class:`RecordedHead` in the place of a head::

    device   level 1 ─► head ─► level 2 ─► head ─► level 3 ...        (fixed shapes, no wait)
    host     ──────────────────────────────── one copy ─► expand_trees(RecordedHead)

The trees are those that a live head would have given, but for nodes that a policy prefers to more likely ones: what
was not expanded on the device has no children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from adaptivespec_vllm.draft.expand import LevelRows


@dataclass(frozen=True, slots=True)
class AheadRows:
    """The nodes of one level of G trees, W each, on the device.

    Attributes:
        tokens: ``int64 [G, W]``, token ids of the target.
        parents: ``int64 [G, W]``, place of each node's parent among the W of the level before (0 on level 1: the root).
        depth: of the nodes, 1 below the root.
        ancestors: ``int64 [G, W]``, bit j set: scratch row j of the same tree is an ancestor or the node itself. Node w
            of the level has scratch row ``(depth - 1) * W + w``.

    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: int
    ancestors: torch.Tensor


class DeviceHead(Protocol):
    """What drafting ahead needs of a head."""

    def children_of(self, rows: AheadRows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``float32 [G, W, width]`` log-probabilities, descending, and ``int64`` token ids of the best children."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was drafted ahead; L levels below the first, whose nodes were expanded.

    Attributes:
        log_probs: ``float32 [G, W]``, of the first level.
        tokens: ``int64 [G, W]``, of the first level.
        expanded: ``int64 [L, G, W]``, tokens of the expanded nodes of each level.
        parents: ``int64 [L, G, W]``, as in :class:`AheadRows`.
        child_log_probs: ``float32 [L, G, W, W]``.
        child_tokens: ``int64 [L, G, W, W]``.

    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    expanded: torch.Tensor
    parents: torch.Tensor
    child_log_probs: torch.Tensor
    child_tokens: torch.Tensor

    @classmethod
    def of(cls, log_probs: torch.Tensor, tokens: torch.Tensor, levels: Sequence[tuple[torch.Tensor, ...]]) -> Ahead:
        """From the first level, and of each further one: expanded nodes, their parents, children's log-probabilities
        and tokens."""
        if levels:
            return cls(log_probs, tokens, *(torch.stack(column) for column in zip(*levels, strict=True)))
        trees, width = tokens.shape
        none = tokens.new_empty(0, trees, width)
        children = none[..., None].expand(0, trees, width, width)
        return cls(log_probs, tokens, none, none, children.float(), children)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of the attributes."""
        return self.log_probs, self.tokens, self.expanded, self.parents, self.child_log_probs, self.child_tokens


def draft_ahead(head: DeviceHead, log_probs: torch.Tensor, tokens: torch.Tensor, depth: int) -> Ahead:
    """Draft G trees to their full width, without a look at a number.

    Args:
        head: its first pass done.
        log_probs: ``float32 [G, W]`` draft log-probabilities of the W best children of each root, descending.
        tokens: ``int64 [G, W]`` their token ids (of the target's vocabulary).
        depth: levels of the trees.

    """
    trees, width = tokens.shape
    parents = torch.zeros_like(tokens)
    bits = torch.bitwise_left_shift(1, torch.arange(width, device=tokens.device)).expand(trees, width)
    frontier, values, ancestors = tokens, log_probs, bits
    levels: list[tuple[torch.Tensor, ...]] = []
    for level in range(1, depth):
        child_log_probs, child_tokens = head.children_of(AheadRows(frontier, parents, level, ancestors), width)
        levels.append((frontier, parents, child_log_probs, child_tokens))
        if level + 1 < depth:
            paths = (values[..., None] + child_log_probs).flatten(1)
            values, best = paths.topk(width)
            parents = torch.div(best, width, rounding_mode="floor")
            frontier = child_tokens.flatten(1).gather(1, best)
            ancestors = ancestors.gather(1, parents) | torch.bitwise_left_shift(bits, level * width)
    return Ahead.of(log_probs, tokens, levels)


class RecordedHead:
    """What a head gave ahead, as a head (``expand.DraftHead``) that is asked level by level.

    Args:
        ahead: on the host.
        requests: request of each of the G trees, in the batch.

    """

    def __init__(self, ahead: Ahead, requests: Sequence[int]) -> None:
        self._expanded, self._parents = ahead.expanded.numpy(), ahead.parents.numpy()
        self._log_probs, self._tokens = ahead.child_log_probs, ahead.child_tokens
        self._tree_of = {request: tree for tree, request in enumerate(requests)}
        self._level = 0
        self._places: np.ndarray | None = None
        """Place of each row of the last call among its tree's nodes of that level; None before the first."""

    def expandable(self, request: int, parent_rows: Sequence[int], tokens: np.ndarray) -> np.ndarray:
        """Which nodes of a request's next level were expanded; arguments by node, as in ``LevelRows``."""
        if self._level >= len(self._expanded):
            return np.zeros(len(tokens), dtype=bool)
        return self._find(np.full(len(tokens), self._tree_of[request]), np.asarray(parent_rows), tokens)[0]

    def children(self, rows: LevelRows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``DraftHead``; only for nodes that were expanded."""
        counts = np.diff(rows.start.numpy())
        trees = np.repeat([self._tree_of.get(request, -1) for request in range(len(counts))], counts)
        found, places = self._find(trees, rows.parent_rows.numpy(), rows.tokens.numpy())
        assert found.all(), "a node was asked for that was not expanded"
        level, self._places = self._level, places
        self._level += 1
        at = torch.from_numpy(trees), torch.from_numpy(places)
        return self._log_probs[level][at][:, :width], self._tokens[level][at][:, :width]

    def _find(self, trees: np.ndarray, parent_rows: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether and where nodes are on the level: a node is known by its token and its parent's place."""
        above = np.zeros(len(tokens), dtype=np.int64) if self._places is None else self._places[parent_rows]
        same = (self._expanded[self._level, trees] == tokens[:, None]) & (
            self._parents[self._level, trees] == above[:, None]
        )
        return same.any(1), same.argmax(1)
