"""TALON: a budget of nodes, spent level by level on whatever is likely enough beside the best of its level."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from adaptivespec_vllm.config import AdaptiveSpecConfig, TreeConfig
from adaptivespec_vllm.policy.base import Drafting, TreePolicy
from adaptivespec_vllm.policy.shape import bounded
from adaptivespec_vllm.types import NO_TREE, TreeShape

_DROPPED = -np.inf


class TalonTree(TreeConfig):
    """What `talon` knows; of ``shape``, ``width`` is K and ``nodes`` is N."""

    keys = ("shape", "mu")
    shapes: ClassVar[Mapping[str, Mapping[str, int]]] = {"shape": {"depth": 7, "width": 10, "nodes": 60}}

    mu: float = Field(
        default=0.03,
        gt=0,
        le=1,
        description="Below the first level, a node is kept when its path probability is at least `mu` times the best "
        "of its level.",
    )

    @property
    def expanded_nodes(self) -> int:
        return self.shape.nodes if self.shape is not None else 0


class TalonPolicy(TreePolicy):
    """Level 1 is the ``width`` best children of the root; every further level holds the children (``width`` of each
    kept node) whose path probability is at least ``mu`` times the best of the level. Levels are added until there are
    ``nodes`` nodes, the last one cut to its best (arXiv 2601.07353).

    ``depth`` ends a tree that is still below its budget: the head can expand so many levels and no more.
    """

    Tree = TalonTree

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        super().__init__(config)
        assert isinstance(config.tree, TalonTree)
        assert config.tree.shape is not None
        self.shape = bounded(config.tree.shape.tree_shape(), config.max_nodes)
        self.least = math.log(config.tree.mu)

    def begin(self, requests: Sequence[str], decoding: Sequence[bool], rows: Sequence[int] | None = None) -> Drafting:
        return _Talon(self.shape, self.least, list(decoding))


class _Talon(Drafting):
    """One step. A candidate that is not kept gets value minus infinity, which is the end of every ranking."""

    def __init__(self, shape: TreeShape, least: float, drafts: list[bool]) -> None:
        super().__init__(drafts)
        # Whatever is kept is expanded, and no more is kept in all, even where a request's own bounds are smaller.
        self.beam = shape.nodes
        self._shape = shape
        self._least = least
        self._left = np.full(len(drafts), shape.nodes)
        self._paths: list[np.ndarray] = [np.zeros(1, dtype=np.float32) for _ in drafts]
        """Path values of the nodes of each request that the head runs over now."""

    def bounds(self, confidences: Sequence[float]) -> list[TreeShape]:
        self.reasons = {"shape": list(self._shape)}
        return [self._shape if drafts else NO_TREE for drafts in self.drafts]

    def values(self, log_probs: np.ndarray, owners: np.ndarray, depth: int) -> np.ndarray:
        values = np.full_like(log_probs, _DROPPED)
        for b in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == b)
            own = log_probs[rows, : self._shape.width]
            paths = self._paths[b][:, None] + own
            least = _DROPPED if depth == 1 else paths.max() + self._least
            best = np.argsort(-paths, axis=None, kind="stable")[: self._left[b]]
            kept = best[paths.ravel()[best] >= least]
            row, child = np.unravel_index(kept, paths.shape)
            values[rows[row], child] = own[row, child]
            self._left[b] -= len(kept)
        return values

    def expand(self, frontiers: Sequence[np.ndarray], candidates: Sequence[np.ndarray]) -> list[int]:
        counts = [self._finite(values) if self._left[b] else 0 for b, values in enumerate(frontiers)]
        self._paths = [values[:count] for values, count in zip(frontiers, counts, strict=True)]
        return counts

    def keep(self, candidates: Sequence[np.ndarray]) -> list[int]:
        return [self._finite(values) for values in candidates]

    @staticmethod
    def _finite(values: np.ndarray) -> int:
        return int(np.count_nonzero(np.isfinite(values)))
