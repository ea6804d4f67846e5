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
NODES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 59, 63)
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

    def of(self, shape: TreeShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a shape of this width does at every position; as the arrays of :class:`Outcomes`."""
        depth, nodes = shape.depth, shape.nodes
        accepted = np.cumprod(self.truth[depth - 1, :, :depth] < nodes, axis=1).sum(1)
        rows = np.zeros((DEPTHS[-1] - 1, len(accepted)), dtype=np.int16)
        rows[: depth - 1] = (self.expandable[: depth - 1] < nodes).sum(2)
        return accepted, np.minimum(self.candidates[depth - 1], nodes), rows


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
        tokens: ``[S, G]``; the last step of a batch may bring more than were asked for.

    """

    shapes: list[TreeShape]
    groups: list[Group]
    seconds: np.ndarray
    tokens: np.ndarray

    def best(self, kind: str | None = None, *, chains: bool = False) -> tuple[TreeShape, float]:
        """The fastest shape on the texts of a kind (all of them without), and its tokens a second."""
        of_kind = self._groups_of(kind)
        allowed = np.array([not chains or shape.width == 1 for shape in self.shapes])
        speeds = np.where(allowed, self.tokens[:, of_kind].sum(1) / self.seconds[:, of_kind].sum(1), 0.0)
        return self.shapes[int(speeds.argmax())], float(speeds.max())

    def best_of_each(self, kind: str | None = None) -> float:
        """Tokens a second where every group is decoded with the shape that is fastest for it, known in hindsight."""
        columns = np.flatnonzero(self._groups_of(kind))
        rows = (self.tokens / self.seconds)[:, columns].argmax(0)
        return float(self.tokens[rows, columns].sum() / self.seconds[rows, columns].sum())

    def _groups_of(self, kind: str | None) -> np.ndarray:
        return np.array([kind is None or group.kind == kind for group in self.groups])


class Search:
    """Decodes the texts of a recording with static shapes, under any costs.

    Args:
        recording: the texts.
        tried: S shapes; the whole grid without.

    """

    def __init__(self, recording: Recording, tried: Sequence[TreeShape] | None = None) -> None:
        self.shapes = shapes() if tried is None else list(tried)
        self._recording = recording
        texts = recording.texts
        positions = [position for text in texts for position in text.positions]
        ends = np.cumsum([text.tokens for text in texts]).tolist()
        self._ends = {text.id: (end - text.tokens, end) for text, end in zip(texts, ends, strict=True)}
        size = (len(self.shapes), len(positions))
        self._accepted = np.zeros(size, dtype=np.int16)
        self._nodes = np.zeros(size, dtype=np.int16)
        self._rows = np.zeros((len(self.shapes), DEPTHS[-1] - 1, len(positions)), dtype=np.int16)
        for width in sorted({shape.width for shape in self.shapes}):
            beam = Beam.grow(positions, width)
            for row, shape in enumerate(self.shapes):
                if shape.width == width:
                    self._accepted[row], self._nodes[row], self._rows[row] = beam.of(shape)

    def run(self, costs: Costs, batch: int = 1) -> Found:
        """The time of every shape; all of them decode side by side, a step at a time."""
        parts = groups(self._recording, batch)
        sizes = np.array([len(group.slots[0]) for group in parts])
        begin, end = np.zeros((2, len(parts), batch, sizes.max()), dtype=np.int64)
        for g, group in enumerate(parts):
            for b, texts in enumerate(group.slots):
                places = np.array([self._ends[text.id] for text in texts])
                begin[g, b, : len(texts)], end[g, b, : len(texts)] = places.T
        tokens = np.array([group.tokens for group in parts])
        step, first, level = (
            _by_rows(table, batch * most)
            for table, most in (
                (costs.of_requests(batch), MAX_TREE_ROWS),
                (costs.first, MAX_TREE_ROWS),
                (costs.level, CHILDREN),
            )
        )
        shape, (of, slot) = np.arange(len(self.shapes))[:, None, None], np.ogrid[: len(parts), :batch]
        turn = np.zeros((len(self.shapes), len(parts), batch), dtype=np.int64)
        at = np.repeat(begin[None, :, :, 0], len(self.shapes), axis=0)
        emitted = np.ones_like(at)  # in the step before
        decoded, seconds = np.zeros(at.shape[:2]), np.zeros(at.shape[:2])
        while (going := decoded < tokens).any():
            spent = step[batch + self._nodes[shape, at].sum(2)] + first[emitted.sum(2)]
            for depth in range(self._rows.shape[1]):
                spent += level[self._rows[shape, depth, at].sum(2)]
            seconds += spent * going
            emitted = self._accepted[shape, at] + 1
            room = end[of, slot, turn] - at
            decoded += np.minimum(emitted, room).sum(2) * going
            done = emitted >= room
            turn = (turn + done) % sizes[:, None]
            at = np.where(done, begin[of, slot, turn], at + emitted)
            emitted = np.where(done, 1, emitted)
        return Found(self.shapes, parts, seconds, decoded)


def _by_rows(table: CostTable, most: int) -> np.ndarray:
    """``[most + 1]`` seconds of so many rows; no rows take no time."""
    return np.concatenate([[0.0], table(np.arange(1, most + 1))])
