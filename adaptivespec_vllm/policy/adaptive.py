"""Shapes that follow each request's signal, or the mean signal of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adaptivespec_vllm.config import AdaptiveSpecConfig, AdaptiveTree
from adaptivespec_vllm.policy.shape import interpolate
from adaptivespec_vllm.policy.shaped import Decision, ShapedPolicy
from adaptivespec_vllm.policy.signal import confidence_signal, strength
from adaptivespec_vllm.types import RequestSignal


class AdaptivePolicy(ShapedPolicy):
    """Between ``tree.low`` and ``tree.high`` by draft confidence times rolling acceptance.

    A request whose breaker is open has signal 0. With scope ``batch`` all requests of a step get the shape of their
    mean signal, so a batch of one is the same in both scopes.
    """

    Tree = AdaptiveTree

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        super().__init__(config)
        assert config.tree.low is not None and config.tree.high is not None
        self._low, self._high = config.tree.low.tree_shape(), config.tree.high.tree_shape()

    def decide(self, signals: Sequence[RequestSignal], confidences: Sequence[float]) -> list[Decision]:
        dcs = [
            0.0 if signal.tripped else confidence_signal(confidence, signal.acceptance)
            for signal, confidence in zip(signals, confidences, strict=True)
        ]
        shared = self._mean(dcs) if self.config.tree.scope == "batch" else dcs
        decisions = []
        for signal, confidence, own, used in zip(signals, confidences, dcs, shared, strict=True):
            s = strength(used, self.config.signal.divisor)
            shape = interpolate(self._low, self._high, s, self.config.max_nodes)
            decisions.append(Decision(signal.acceptance, signal.tripped, confidence, own, s, shape))
        return decisions

    @staticmethod
    def _mean(dcs: list[float]) -> list[float]:
        # fsum: the same whatever the order of requests in the batch
        return [math.fsum(dcs) / len(dcs)] * len(dcs) if dcs else []
