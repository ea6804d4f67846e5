"""Typical acceptance: a token that is likely enough for how sure the target is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from adaptivespec_vllm.config import AdaptiveSpecConfig, RuleConfig
from adaptivespec_vllm.rules.base import Rule

if TYPE_CHECKING:
    import torch


class TypicalConfig(RuleConfig):
    """Parameters of typical acceptance."""

    epsilon: float = Field(
        default=0.09, gt=0, le=1, description="A token more likely than this is accepted, however sure the target is."
    )
    delta: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="So is one more likely than `delta` times e to the minus entropy of the target (nats).",
    )

    @property
    def says(self) -> str:
        return (
            f"a draft token is accepted above a probability of {self.epsilon}, or of {self.delta} * exp(-entropy) "
            "where that is less"
        )


class Typical(Rule):
    """Accepts x where ``p(x) > min(epsilon, delta * exp(-H(p)))`` (Medusa, arXiv 2401.10774)."""

    Config = TypicalConfig

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        super().__init__(config)
        assert isinstance(config.rule, TypicalConfig)
        self._epsilon, self._delta = config.rule.epsilon, config.rule.delta

    def acceptable(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        p = logits.float().softmax(-1)
        entropy = -p.xlogy(p).sum(-1)
        least = (self._delta * (-entropy).exp()).clamp(max=self._epsilon)
        return p[rows, tokens] > least[rows]
