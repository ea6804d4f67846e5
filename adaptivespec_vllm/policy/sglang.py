"""SGLang's adaptive chains: one length for the batch, from how many drafts were accepted lately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from adaptivespec_vllm.config import AdaptiveSpecConfig, ShapeConfig, TreeConfig
from adaptivespec_vllm.policy.base import Drafting
from adaptivespec_vllm.policy.shaped import Decision, ShapedPolicy
from adaptivespec_vllm.policy.signal import confidence_signal
from adaptivespec_vllm.types import MAX_TREE_NODES, RequestSignal, StepFeedback, TreeShape

DOWN = -0.25
"""Added to where a length is given up for the next shorter one, so that it is given up later than it was taken."""


def _ascending(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if not lengths or list(lengths) != sorted(set(lengths)) or not 1 <= lengths[0] <= lengths[-1] <= MAX_TREE_NODES:
        raise ValueError("not ascending")
    return lengths


class SglangTree(TreeConfig):
    """What `sglang-adaptive` knows."""

    keys = ("lengths", "alpha", "interval", "warmup")

    lengths: Annotated[tuple[int, ...], AfterValidator(_ascending)] = Field(
        default=(1, 3, 5, 7),
        strict=False,
        description="Lengths of the chain to choose from.",
        json_schema_extra={"allowed": f"a list of ascending integers from 1 to {MAX_TREE_NODES}"},
    )
    alpha: float = Field(
        default=0.2, gt=0, le=1, description="Weight of the newest step in the rolling mean of accepted drafts."
    )
    interval: int = Field(default=5, ge=1, le=1_000_000, description="Steps between two choices of a length.")
    warmup: int = Field(default=10, ge=0, le=1_000_000, description="Steps before the first choice counts.")

    def bounds(self) -> list[tuple[str, ShapeConfig]]:
        longest = max(self.lengths)
        return [("tree.lengths", ShapeConfig(depth=longest, width=1, nodes=longest))]


class SglangPolicy(ShapedPolicy):
    """Picks the chain length from a list by a moving average of accepted drafts.

    After each step the batch's mean number of accepted drafts joins the average, which begins one below the length in
    the middle of the list, the first to be used. Every ``interval`` steps, once ``warmup`` steps have passed, the
    length becomes shorter while the average is at most the next shorter length - 0.75, or else longer while the
    average is above the length - 0.5.
    """

    Tree = SglangTree

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        super().__init__(config)
        assert isinstance(config.tree, SglangTree)
        self._tree = config.tree
        self._lengths = config.tree.lengths
        self._index = len(self._lengths) // 2
        self._average = self.length - 1.0
        self._steps = 0

    @property
    def length(self) -> int:
        """Of the chain that is drafted now."""
        return self._lengths[self._index]

    def decide(self, signals: Sequence[RequestSignal], confidences: Sequence[float]) -> list[Decision]:
        shape = TreeShape(self.length, 1, self.length)
        return [
            Decision(
                signal.acceptance,
                signal.tripped,
                confidence,
                confidence_signal(confidence, signal.acceptance),
                self._average,
                shape,
            )
            for signal, confidence in zip(signals, confidences, strict=True)
        ]

    def observe(self, feedbacks: Mapping[str, StepFeedback], drafting: Drafting | None = None) -> None:
        super().observe(feedbacks)
        accepted = [feedback.accepted for feedback in feedbacks.values() if feedback.drafted_nodes]
        if not accepted:
            return
        alpha = self._tree.alpha
        self._average = (1 - alpha) * self._average + alpha * sum(accepted) / len(accepted)
        self._steps += 1
        since = self._steps - self._tree.warmup
        if since > 0 and since % self._tree.interval == 0:
            self._index = self._choose()

    def _choose(self) -> int:
        """Index of the length that the average asks for."""
        index = self._index
        while index > 0 and self._average <= self._lengths[index - 1] - 0.5 + DOWN:
            index -= 1
        if index < self._index:
            return index
        while index < len(self._lengths) - 1 and self._average > self._lengths[index] - 0.5:
            index += 1
        return index
