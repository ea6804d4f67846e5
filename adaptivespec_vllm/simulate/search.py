"""The best static shape by trying them all.

What a static tree drafts and what is accepted of it follows from the position alone, so it is worked out for all
positions at once: the beam of a width is grown to its full depth, and each node keeps its **rank** among the best
nodes of its own and of shallower levels. A node is in the tree of (depth, width, nodes) if its rank among levels up to
``depth`` is below ``nodes``, and it is expanded if its rank among levels up to its own is (``draft.pool`` has the
reason). ``tests/unit`` holds this against the expansion itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptivespec_vllm.config import MAX_EXPANDED_NODES
from adaptivespec_vllm.policy.costs import Costs, CostTable
from adaptivespec_vllm.simulate.recording import CHILDREN, Position, Recording
from adaptivespec_vllm.simulate.replay import Group, groups
from adaptivespec_vllm.types import MAX_TREE_NODES, MAX_TREE_ROWS, TreeShape

DEPTHS = range(1, 11)
WIDTHS = range(1, CHILDREN + 1)
NODES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 59, 63)
_OUT = MAX_TREE_NODES
"""Rank of what no tree keeps."""


def shapes(depths: Sequence[int] = DEPTHS, widths: Sequence[int] = WIDTHS) -> list[TreeShape]:
    """Every shape of the grid that a configuration may have; chains are those of width 1."""
    return [
        TreeShape(depth, width, nodes)
        for width in widths
        for depth in depths
        for nodes in NODES
        if depth <= nodes <= width + (depth - 1) * width**2
        and width * (depth - 1) <= MAX_EXPANDED_NODES
        and (width > 1 or nodes == depth)
    ]


@dataclass(frozen=True)
class Beam:
    """The trees of one width at all P positions.

    Attributes:
        expandable: ``int16 [depths, P, width]`` ranks of the nodes of each level that may be expanded.
        truth: ``int16 [depths, P, depths]`` ranks, among levels up to the first index, of the node of each level that
            the text goes on with; ``_OUT`` where there is none.
        candidates: ``int16 [depths, P]`` nodes of levels up to each that a tree may keep.

    """

    expandable: np.ndarray
    truth: np.ndarray
    candidates: np.ndarray

    @staticmethod
    def grow(positions: Sequence[Position], width: int) -> Beam:
        """The beam of a width, to its full depth."""
        table = _Table(positions)
        count = len(positions)
        depths = [d for d in DEPTHS if width * (d - 1) <= MAX_EXPANDED_NODES]
        ranks: list[np.ndarray] = []
        truths: list[np.ndarray] = []
        candidates: list[np.ndarray] = []
        kept_values = np.full((count, 0), -np.inf, dtype=np.float32)
        kept_ids = np.zeros((count, 0), dtype=np.int64)
        frontier = table.roots[:, None]
        values = np.zeros((count, 1), dtype=np.float32)
        truth_ids = np.full((count, len(depths)), -1, dtype=np.int64)
        for level, _ in enumerate(depths):
            own = table.log_probs[frontier, :width] + values[:, :, None]
            own[~np.isfinite(values)] = -np.inf
            flat = own.reshape(count, -1)
            ids = (frontier[:, :, None] * CHILDREN + np.arange(width)).reshape(count, -1)
            truth_ids[:, level] = table.child_of_truth(truth_ids[:, level - 1] if level else None)
            kept_values, kept_ids = _best(
                np.concatenate([kept_values, flat], 1), np.concatenate([kept_ids, ids], 1), MAX_TREE_NODES
            )
            kept_ids = np.where(np.isfinite(kept_values), kept_ids, -2)
            candidates.append((kept_ids >= 0).sum(1))
            values, at = _best(flat, ids, width)
            rank = _ranks(kept_ids, np.where(np.isfinite(values), at, -1))
            values = np.where(rank < _OUT, values, -np.inf)
            frontier = table.nodes_of(at)
            ranks.append(np.pad(rank, ((0, 0), (0, width - rank.shape[1])), constant_values=_OUT))
            truths.append(_ranks(kept_ids, truth_ids))
        return Beam(*(np.array(column, dtype=np.int16) for column in (ranks, truths, candidates)))

    def outcome(self, shape: TreeShape) -> Outcome:
        """What a shape of this width does at every position."""
        depth, nodes = shape.depth, shape.nodes
        accepted = np.cumprod(self.truth[depth - 1, :, :depth] < nodes, axis=1).sum(1)
        rows = (self.expandable[: depth - 1] < nodes).sum(2)
        return Outcome(accepted, np.minimum(self.candidates[depth - 1], nodes), rows)


@dataclass(frozen=True)
class Outcome:
    """Of P positions.

    Attributes:
        accepted: ``[P]`` accepted nodes.
        nodes: ``[P]`` verified nodes.
        rows: ``[levels, P]`` nodes that the head runs over for each level below the first.

    """

    accepted: np.ndarray
    nodes: np.ndarray
    rows: np.ndarray


class _Table:
    """All recorded nodes of all positions, one after the other."""

    def __init__(self, positions: Sequence[Position]) -> None:
        sizes = np.array([len(position.taken) for position in positions])
        self.roots = np.cumsum(sizes) - sizes
        # The last row stands for a node that was not recorded.
        self.log_probs = np.concatenate(
            [*(p.log_probs for p in positions), np.full((1, CHILDREN), -np.inf, dtype=np.float32)]
        )
        offset = np.repeat(self.roots, sizes)[:, None]
        nodes = np.concatenate([p.nodes for p in positions]).astype(np.int64)
        self._nodes = np.concatenate(
            [np.where(nodes < 0, sizes.sum(), nodes + offset), np.full((1, CHILDREN), sizes.sum())]
        ).ravel()
        self._taken = np.concatenate([*(p.taken for p in positions), [-1]]).astype(np.int64)

    def nodes_of(self, ids: np.ndarray) -> np.ndarray:
        """The recorded nodes that children are; an id is the parent's node times ``CHILDREN`` plus the rank."""
        return self._nodes[ids]

    def child_of_truth(self, parents: np.ndarray | None) -> np.ndarray:
        """Ids of the children that the texts go on with, below those of the level above (None: below the roots)."""
        nodes = self.roots if parents is None else np.where(parents < 0, len(self._taken) - 1, self._nodes[parents])
        taken = self._taken[nodes]
        return np.where(taken < 0, -1, nodes * CHILDREN + taken)


def _best(values: np.ndarray, ids: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest values of each row, and their ids; of equal ones the earlier first."""
    order = np.argsort(-values, axis=1, kind="stable")[:, :most]
    return np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)


def _ranks(kept: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """``[P, n]`` places of ids among the kept ones; ``_OUT`` where they are not among them."""
    same = kept[:, None, :] == ids[:, :, None]
    return np.where(same.any(2), same.argmax(2), _OUT)


@dataclass(frozen=True)
class Found:
    """The time of every shape on every group.

    Attributes:
        shapes: S shapes.
        groups: G groups of texts.
        seconds: ``[S, G]``.
        tokens: ``[G]``.

    """

    shapes: list[TreeShape]
    groups: list[Group]
    seconds: np.ndarray
    tokens: np.ndarray

    def best(self, kind: str | None = None, *, chains: bool = False) -> tuple[TreeShape, float]:
        """The fastest shape on the texts of a kind (all of them without), and its tokens a second."""
        of_kind = np.array([kind is None or group.kind == kind for group in self.groups])
        allowed = np.array([not chains or shape.width == 1 for shape in self.shapes])
        seconds = np.where(allowed, self.seconds[:, of_kind].sum(1), np.inf)
        index = int(seconds.argmin())
        return self.shapes[index], float(self.tokens[of_kind].sum() / seconds[index])

    def best_of_each(self, kind: str | None = None) -> float:
        """Tokens a second where every group is decoded with the shape that is fastest for it, known in hindsight."""
        of_kind = np.array([kind is None or group.kind == kind for group in self.groups])
        return float(self.tokens[of_kind].sum() / self.seconds[:, of_kind].min(0).sum())


def search(recording: Recording, costs: Costs, batch: int = 1, tried: Sequence[TreeShape] | None = None) -> Found:
    """Decode all texts with every static shape."""
    tried = shapes() if tried is None else list(tried)
    parts = groups(recording, batch)
    positions = [position for text in recording.texts for position in text.positions]
    starts = np.cumsum([0, *(text.tokens for text in recording.texts)]).tolist()
    start_of = {text.id: start for text, start in zip(recording.texts, starts, strict=False)}
    clock = _Clock(costs, batch)
    seconds = np.zeros((len(tried), len(parts)))
    for width in sorted({shape.width for shape in tried}):
        beam = Beam.grow(positions, width)
        for row, shape in enumerate(tried):
            if shape.width == width:
                outcome = beam.outcome(shape)
                for column, group in enumerate(parts):
                    first = np.array([start_of[text.id] for text in group.texts])
                    end = first + [text.tokens for text in group.texts]
                    seconds[row, column] = clock.decode(outcome, first, end)
    tokens = np.array([sum(text.tokens for text in group.texts) for group in parts])
    return Found(tried, parts, seconds, tokens)


class _Clock:
    """Seconds by rows, looked up."""

    def __init__(self, costs: Costs, batch: int) -> None:
        def table(of: CostTable, most: int) -> np.ndarray:
            return np.array([0.0, *np.atleast_1d(of(np.arange(1, most + 1)))])

        self._overhead = costs.overhead
        self._target = table(costs.target, batch * MAX_TREE_ROWS)
        self._first = table(costs.first, batch * MAX_TREE_ROWS)
        self._level = table(costs.level, batch * CHILDREN)

    def decode(self, outcome: Outcome, at: np.ndarray, end: np.ndarray) -> float:
        """Seconds of decoding texts together, from their first positions to their ends."""
        seconds, rows = 0.0, np.ones_like(at)
        while len(at):
            seconds += self._overhead + self._target[len(at) + outcome.nodes[at].sum()] + self._first[rows.sum()]
            seconds += self._level[outcome.rows[:, at].sum(1)].sum()
            rows = outcome.accepted[at] + 1
            at = at + rows
            going = at < end
            at, end, rows = at[going], end[going], rows[going]
        return float(seconds)
