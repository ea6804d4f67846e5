"""Policies that give each request a shape before its tree grows, and no more thought after that."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from adaptivespec_vllm.config import AdaptiveSpecConfig
from adaptivespec_vllm.policy.base import Drafting, TreePolicy
from adaptivespec_vllm.types import NO_TREE, RequestSignal, TreeShape


@dataclass(frozen=True, slots=True)
class Decision:
    """A request's shape and what it was computed from.

    Attributes:
        acceptance: RAR of the request before the step.
        tripped: whether its circuit breaker was open.
        confidence: the draft's probability of its own first choice at the root.
        dcs: confidence times RAR; 0 with the breaker open.
        s: strength that gave the shape.
        shape: what the request may draft.

    """

    acceptance: float
    tripped: bool
    confidence: float
    dcs: float
    s: float
    shape: TreeShape


class ShapedPolicy(TreePolicy):
    """Chooses shapes from signals and confidences; a value is the draft's own log-probability."""

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        super().__init__(config)
        least = config.tree.min_path_probability
        self._least_value = math.log(least) if least > 0 else -math.inf

    @abstractmethod
    def decide(self, signals: Sequence[RequestSignal], confidences: Sequence[float]) -> list[Decision]:
        """A shape for each request of a step, with its reasons."""

    def begin(self, requests: Sequence[str], decoding: Sequence[bool], rows: Sequence[int] | None = None) -> Drafting:
        return _Shaped(self, [self.signal(request) for request in requests], list(decoding), self._least_value)


class _Shaped(Drafting):
    """All nodes within the shape whose path is likely enough."""

    def __init__(
        self, policy: ShapedPolicy, signals: list[RequestSignal], drafts: list[bool], least_value: float
    ) -> None:
        super().__init__(drafts)
        self._policy = policy
        self._signals = signals
        self._least_value = least_value

    def bounds(self, confidences: Sequence[float]) -> list[TreeShape]:
        decisions = self._policy.decide(self._signals, confidences)
        self.reasons = {"decisions": [asdict(decision) | {"shape": list(decision.shape)} for decision in decisions]}
        return [decision.shape if drafts else NO_TREE for decision, drafts in zip(decisions, self.drafts, strict=True)]

    def expand(self, frontiers: Sequence[np.ndarray], candidates: Sequence[np.ndarray]) -> list[int]:
        return [self._likely(values) for values in frontiers]

    def keep(self, candidates: Sequence[np.ndarray]) -> list[int]:
        return [self._likely(values) for values in candidates]

    def _likely(self, values: np.ndarray) -> int:
        return int(np.count_nonzero(values >= self._least_value))
