"""FLy: an isolated mismatch, where the target is unsure and then agrees with the draft again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from adaptivespec_vllm.config import AdaptiveSpecConfig, RuleConfig
from adaptivespec_vllm.rules.base import Rule
from adaptivespec_vllm.types import MAX_TREE_NODES

if TYPE_CHECKING:
    import torch

LONGEST_DEFAULT = 6
"""Window where none is written and the chain is long enough for it."""


class FlyConfig(RuleConfig):
    """Parameters of FLy."""

    chains_only: ClassVar[bool] = True

    theta: float = Field(
        default=0.3,
        ge=0,
        description="Entropy (nats) that the target's three likeliest tokens must have where a mismatch is kept.",
    )
    window: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TREE_NODES - 1,
        description=f"Draft tokens behind a mismatch that must all be the target's choices; null is {LONGEST_DEFAULT}, "
        "or one less than the longest chain.",
    )

    @property
    def says(self) -> str:
        window = "whole window" if self.window is None else f"next {self.window} tokens"
        return f"a mismatch is kept where the target's top-3 entropy is at least {self.theta} and the {window} exact"

    def faults(self, depth: int) -> Iterator[str]:
        if depth < 2:
            yield "rule.name: got 'fly', which looks at what follows a mismatch; allowed: chains of at least 2 tokens"
        elif self.window is not None and self.window >= depth:
            yield (
                f"rule.window: got {self.window}, as long as the longest chain; allowed: at most {depth - 1} "
                "(one less than its depth)"
            )


class Fly(Rule):
    """Keeps a mismatch where the top-3 entropy is at least ``theta`` and the window behind it is exact.

    The three probabilities are those of the whole softmax, not scaled to a sum of 1 (arXiv 2511.22972).
    """

    Config = FlyConfig

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        super().__init__(config)
        assert isinstance(config.rule, FlyConfig)
        self._theta = config.rule.theta
        self.window = config.rule.window or min(LONGEST_DEFAULT, config.max_depth - 1)

    def acceptable(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        p = logits.float().softmax(-1).topk(min(3, logits.shape[-1]), dim=-1).values
        entropy = -p.xlogy(p).sum(-1)
        return (entropy >= self._theta)[rows]
