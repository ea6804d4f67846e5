"""Contract of a tree policy.

A policy is asked once a step which tree each request may draft, and told after the step what came of it. It holds no
state of its own: everything it remembers of a request is in that request's :class:`RequestSignal`, so the same inputs
give the same shapes, on any rank and in a replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adaptivespec_vllm.config import AdaptiveSpecConfig
from adaptivespec_vllm.policy import signal as signals_
from adaptivespec_vllm.types import RequestSignal, StepFeedback, TreeShape


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a request got its shape: enough to compute it again.

    Attributes:
        step: which step; decisions of one step were taken together.
        acceptance: RAR of the request before the step.
        tripped: whether its circuit breaker was open.
        confidence: the draft's probability of its own first choice at the root.
        dcs: confidence times RAR; 0 with the breaker open.
        s: strength that gave the shape.
        shape: what the request may draft.

    """

    step: int
    acceptance: float
    tripped: bool
    confidence: float
    dcs: float
    s: float
    shape: TreeShape

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for a JSON log line."""
        return asdict(self) | {"shape": list(self.shape)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Decision:
        return Decision(**(values | {"shape": TreeShape(*values["shape"])}))


class TreePolicy(ABC):
    """Chooses trees from signals; see the module's own text."""

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        self.config = config

    def new_signal(self) -> RequestSignal:
        """The signal of a request that has not decoded yet."""
        return RequestSignal(acceptance=self.config.signal.initial)

    def choose(self, signals: Sequence[RequestSignal], confidences: Sequence[float]) -> list[TreeShape]:
        """A shape for each request of a step.

        Args:
            signals: one per request.
            confidences: the draft's probability of its own first choice at each request's root, in the same order.

        """
        return [decision.shape for decision in self.decide(signals, confidences)]

    @abstractmethod
    def decide(self, signals: Sequence[RequestSignal], confidences: Sequence[float], step: int = 0) -> list[Decision]:
        """The same as :meth:`choose`, with the reasons."""

    def observe(self, signal: RequestSignal, feedback: StepFeedback) -> None:
        """Bring a request's signal up to date with what the step gave."""
        signals_.observe(signal, feedback, self.config.signal)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A logged decision that comes out differently when computed again."""

    index: int
    logged: Decision
    computed: Decision


def replay(decisions: Iterable[Decision], policy: TreePolicy) -> list[Mismatch]:
    """Compute logged decisions again from their inputs; the ones that differ, in the order of the log."""
    steps: dict[int, list[tuple[int, Decision]]] = {}
    for index, decision in enumerate(decisions):
        steps.setdefault(decision.step, []).append((index, decision))
    mismatches = []
    for step, entries in steps.items():
        signals = [RequestSignal(d.acceptance, tripped=d.tripped) for _, d in entries]
        again = policy.decide(signals, [d.confidence for _, d in entries], step)
        mismatches += [
            Mismatch(index, logged, computed)
            for (index, logged), computed in zip(entries, again, strict=True)
            if logged != computed
        ]
    return sorted(mismatches, key=lambda mismatch: mismatch.index)
