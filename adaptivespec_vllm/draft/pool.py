"""The candidates of one request's tree while it grows, and the choice of the nodes that are kept.

EAGLE-2's rule: the value of a node is the sum of draft log-probabilities from the root; of all candidates of all
levels the ``nodes`` best are kept (ties: the shallower node). A child is never worth more than its parent, so the kept
set is always a connected tree, and so is every prefix of it.
"""

from __future__ import annotations

import numpy as np

from adaptivespec_vllm.types import DraftTree, TreeShape

ROOT = -1
"""Pool index that stands for the root."""


class CandidatePool:
    """Candidates of one request, appended level by level.

    Args:
        shape: bounds of the tree.
        min_value: candidates with a path value (log-probability) below it are never kept.

    """

    def __init__(self, shape: TreeShape, min_value: float = -np.inf) -> None:
        self.shape = shape
        self.depth = 0
        self._min_value = min_value
        self._values = np.empty(0, dtype=np.float32)
        self._tokens = np.empty(0, dtype=np.int64)
        self._parents = np.empty(0, dtype=np.int64)

    def add_level(self, log_probs: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """Add the children of the expanded nodes and choose which of them to expand next.

        Only nodes that would be kept if the tree ended here are worth expanding: a child is worth at most as much
        as its parent, so the children of a node outside the ``nodes`` best can never be kept. This is exact, and it
        ends many trees levels before ``depth``.

        Args:
            log_probs: ``[R, k]`` log-probabilities of the k best children of each expanded node, descending.
            tokens: ``[R, k]`` their token ids.
            parents: ``[R]`` pool index of each expanded node, ``ROOT`` for the root.

        Returns:
            Pool indices of the nodes to expand next (best first), empty when the tree is complete.

        """
        width = min(self.shape.width, log_probs.shape[1])
        values = log_probs[:, :width]
        if parents[0] != ROOT:
            values = values + self._values[parents, None]
        flat = values.ravel()
        first = len(self._values)
        self._values = np.concatenate([self._values, flat])
        self._tokens = np.concatenate([self._tokens, tokens[:, :width].ravel()])
        self._parents = np.concatenate([self._parents, np.repeat(parents, width)])
        self.depth += 1

        if self.depth >= self.shape.depth:
            return np.empty(0, dtype=np.int64)
        best = first + np.argsort(-flat, kind="stable")[: self.shape.width]
        kept = self._kept()
        return best[np.isin(best, kept)]

    def tokens_of(self, indices: np.ndarray) -> np.ndarray:
        """Token ids of candidates."""
        return self._tokens[indices]

    def parents_of(self, indices: np.ndarray) -> np.ndarray:
        """Pool indices of the parents of candidates, ``ROOT`` for the root."""
        return self._parents[indices]

    def _kept(self) -> np.ndarray:
        order = np.argsort(-self._values, kind="stable")[: self.shape.nodes]
        return order[self._values[order] >= self._min_value]

    def tree(self, root_position: int, confidence: float) -> DraftTree:
        """The kept nodes, best first, as the request's draft tree."""
        kept = self._kept()
        row_of = np.zeros(len(self._values) + 1, dtype=np.int64)  # the last entry is pool index ROOT: row 0
        row_of[kept] = np.arange(1, len(kept) + 1)
        return DraftTree(
            tokens=self._tokens[kept].tolist(),
            parents=row_of[self._parents[kept]].tolist(),
            root_position=root_position,
            confidence=confidence,
            shape=self.shape,
        )
