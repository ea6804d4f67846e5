"""Contract of a lossy rule.

The walk (:mod:`adaptivespec_vllm.verify`) does what all rules have in common: a child that is the target's choice is
taken first; otherwise, of the children that the rule accepts, the one with the largest logit (of equals the earlier
node). EOS and stop tokens are neither accepted nor replaced, a token with logit -inf is never accepted, and caps,
guards and counters are those of the margin rule. A rule only says which tokens are acceptable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from adaptivespec_vllm.config import AdaptiveSpecConfig, RuleConfig

if TYPE_CHECKING:
    import torch


class Rule(ABC):
    """Which drafted tokens may stand in for the target's choice.

    Attributes:
        Config: the keys of ``rule`` in the configuration, with bounds, defaults and meaning.
        window: so many draft tokens behind an accepted one must all be the target's own choices, or it is not
            accepted after all. Above 0 the rule verifies chains only (``Config.chains_only``).

    """

    Config: ClassVar[type[RuleConfig]]
    window: int = 0

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        self.config = config
        """The settings, in which ``rule`` is a ``Config`` of this rule."""

    @abstractmethod
    def acceptable(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Whether each of N drafted tokens may be accepted although the target chose another one.

        Args:
            logits: ``[T, V]`` of the target, after everything that changes them for a request; at a temperature, those
                of the tempered, truncated distribution. Any float type; a forbidden token has -inf.
            rows: ``int64 [N]``, the row of ``logits`` that speaks of each token's place.
            tokens: ``int64 [N]``, in ``0 .. V - 1``.

        Returns:
            ``bool [N]``; False wherever a NaN is involved.

        """
