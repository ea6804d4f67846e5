"""The candidates of one request's tree while it grows, and the choice of the nodes that are kept.

EAGLE-2's rule: a node is worth the sum of the values from the root to it (draft log-probabilities, or what a policy
makes of them); of all candidates of all levels the best are kept (ties: the shallower node). A child is never worth
more than its parent, so the kept set is always a connected tree, and so is every prefix of it.
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
        beam: nodes of a level that may be expanded at most; None is the shape's width.

    """

    def __init__(self, shape: TreeShape, beam: int | None = None) -> None:
        self.shape = shape
        self._beam = beam or shape.width
        self.depth = 0
        self._values = np.empty(0, dtype=np.float32)
        self._log_probs = np.empty(0, dtype=np.float32)
        self._tokens = np.empty(0, dtype=np.int64)
        self._parents = np.empty(0, dtype=np.int64)
        self.ranked = np.empty(0, dtype=np.int64)
        """Pool indices of the ``nodes`` best candidates so far, best first."""

    def add_level(
        self, values: np.ndarray, log_probs: np.ndarray, tokens: np.ndarray, parents: np.ndarray
    ) -> np.ndarray:
        """Add the children of the expanded nodes and say which of them may be expanded next.

        Only nodes that would be kept if the tree ended here are worth expanding: a child is worth at most as much
        as its parent, so the children of a node outside the ``nodes`` best can never be kept. This is exact, and it
        ends many trees levels before ``depth``.

        Args:
            values: ``[R, k]`` what the k best children of each expanded node are worth given their parent, descending.
            log_probs: ``[R, k]`` their draft log-probabilities given their parent.
            tokens: ``[R, k]`` their token ids.
            parents: ``[R]`` pool index of each expanded node, ``ROOT`` for the root.

        Returns:
            Pool indices of the nodes that may be expanded next (best first), empty when the tree is complete.

        """
        width = min(self.shape.width, values.shape[1])
        values = values[:, :width]
        if parents[0] != ROOT:
            values = values + self._values[parents, None]
        flat = values.ravel()
        first = len(self._values)
        self._values = np.concatenate([self._values, flat])
        self._log_probs = np.concatenate([self._log_probs, log_probs[:, :width].ravel()])
        self._tokens = np.concatenate([self._tokens, tokens[:, :width].ravel()])
        self._parents = np.concatenate([self._parents, np.repeat(parents, width)])
        self.depth += 1
        self.ranked = np.argsort(-self._values, kind="stable")[: self.shape.nodes]

        if self.depth >= self.shape.depth:
            return np.empty(0, dtype=np.int64)
        best = first + np.argsort(-flat, kind="stable")[: self._beam]
        return best[np.isin(best, self.ranked)]

    def values_of(self, indices: np.ndarray) -> np.ndarray:
        """Path values of candidates."""
        return self._values[indices]

    def tokens_of(self, indices: np.ndarray) -> np.ndarray:
        """Token ids of candidates."""
        return self._tokens[indices]

    def parents_of(self, indices: np.ndarray) -> np.ndarray:
        """Pool indices of the parents of candidates, ``ROOT`` for the root."""
        return self._parents[indices]

    def tree(self, nodes: int, root_position: int, confidence: float) -> DraftTree:
        """The ``nodes`` best candidates, best first, as the request's draft tree."""
        kept = self.ranked[:nodes]
        row_of = np.zeros(len(self._values) + 1, dtype=np.int64)  # the last entry is pool index ROOT: row 0
        row_of[kept] = np.arange(1, len(kept) + 1)
        return DraftTree(
            tokens=self._tokens[kept].tolist(),
            parents=row_of[self._parents[kept]].tolist(),
            root_position=root_position,
            confidence=confidence,
            shape=self.shape,
            log_probs=self._log_probs[kept].tolist(),
        )
