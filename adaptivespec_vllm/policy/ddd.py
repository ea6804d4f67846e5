"""Dynamic depth: a beam that goes on while it still holds enough of the draft's probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from adaptivespec_vllm.config import AdaptiveSpecConfig, TreeConfig
from adaptivespec_vllm.policy.base import Drafting, TreePolicy
from adaptivespec_vllm.policy.shape import bounded
from adaptivespec_vllm.types import NO_TREE, TreeShape


class DddTree(TreeConfig):
    """What `ddd` knows."""

    keys = ("shape", "threshold")
    shapes: ClassVar[Mapping[str, Mapping[str, int]]] = {"shape": {"depth": 7, "width": 10, "nodes": 60}}

    threshold: float = Field(
        default=-0.7,
        le=0,
        description="Another level is drafted when the log of the summed path probabilities of the frontier is above "
        "this (nats).",
    )


class DddPolicy(TreePolicy):
    """The static tree of ``shape`` with a depth that follows the draft: it goes on to the next level if and only if
    logsumexp of the frontier's path log-probabilities is above ``threshold`` (Dynamic Depth Decoding, arXiv
    2409.00142). The frontier is what would be expanded: the ``width`` best nodes of the last level, of those that are
    among the ``nodes`` best so far. The default is about ln 0.5, half of the draft's probability.
    """

    Tree = DddTree

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        super().__init__(config)
        assert isinstance(config.tree, DddTree)
        assert config.tree.shape is not None
        self.shape = bounded(config.tree.shape.tree_shape(), config.max_nodes)
        self.threshold = config.tree.threshold

    def begin(self, requests: Sequence[str], decoding: Sequence[bool], rows: Sequence[int] | None = None) -> Drafting:
        return _Ddd(self.shape, self.threshold, list(decoding))


class _Ddd(Drafting):
    """One step."""

    def __init__(self, shape: TreeShape, threshold: float, drafts: list[bool]) -> None:
        super().__init__(drafts)
        self._shape = shape
        self._threshold = threshold

    def bounds(self, confidences: Sequence[float]) -> list[TreeShape]:
        self.reasons = {"mass": []}
        return [self._shape if drafts else NO_TREE for drafts in self.drafts]

    def expand(self, frontiers: Sequence[np.ndarray], candidates: Sequence[np.ndarray]) -> list[int]:
        masses = [
            float(np.logaddexp.reduce(values.astype(np.float64))) if len(values) else None for values in frontiers
        ]
        self.reasons["mass"].append(masses)
        return [
            len(values) if mass is not None and mass > self._threshold else 0
            for values, mass in zip(frontiers, masses, strict=True)
        ]

    def keep(self, candidates: Sequence[np.ndarray]) -> list[int]:
        return [len(values) for values in candidates]
