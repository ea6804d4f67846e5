"""One shape for every request and step."""

from __future__ import annotations

from collections.abc import Sequence

from adaptivespec_vllm.config import AdaptiveSpecConfig, StaticTree
from adaptivespec_vllm.policy.shape import bounded
from adaptivespec_vllm.policy.shaped import Decision, ShapedPolicy
from adaptivespec_vllm.policy.signal import confidence_signal
from adaptivespec_vllm.types import RequestSignal


class StaticPolicy(ShapedPolicy):
    """Always ``tree.shape``; signals are still kept, for the margin guard and the log."""

    Tree = StaticTree

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        super().__init__(config)
        assert config.tree.shape is not None
        self._shape = bounded(config.tree.shape.tree_shape(), config.max_nodes)

    def decide(self, signals: Sequence[RequestSignal], confidences: Sequence[float]) -> list[Decision]:
        return [
            Decision(
                signal.acceptance,
                signal.tripped,
                confidence,
                confidence_signal(confidence, signal.acceptance),
                1.0,
                self._shape,
            )
            for signal, confidence in zip(signals, confidences, strict=True)
        ]
