"""MARS: the target's second choice, where its logit is close to that of the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from adaptivespec_vllm.config import AdaptiveSpecConfig, RuleConfig
from adaptivespec_vllm.rules.base import Rule

if TYPE_CHECKING:
    import torch


class MarsConfig(RuleConfig):
    """Parameters of MARS."""

    theta: float = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="The target's second choice is accepted when its logit is above `theta` times that of the first.",
    )

    @property
    def says(self) -> str:
        return f"the target's second choice is accepted where its logit is above {self.theta} times that of the first"


class Mars(Rule):
    """Accepts x where ``z_x`` is the second largest logit, ``z_1 > 0`` and ``z_x / z_1 > theta`` (arXiv 2601.15498).

    Logits as they are: the rule changes with a constant that is added to all of them, though no probability does. At a
    temperature the drawn token is the target's choice, and the first choice itself may be what stands in for it.
    """

    Config = MarsConfig

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        super().__init__(config)
        assert isinstance(config.rule, MarsConfig)
        self._theta = config.rule.theta

    def acceptable(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        first, second = logits.topk(2, dim=-1).values.float()[rows].unbind(-1)
        z = logits[rows, tokens].float()
        return (z >= second) & (first > 0) & (z > self._theta * first)
