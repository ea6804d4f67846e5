"""What a lossy rule may do for one request in one step."""

from __future__ import annotations

import math
from typing import NamedTuple

from adaptivespec_vllm.config import GuardConfig, LossyConfig
from adaptivespec_vllm.types import RequestSignal


class MarginAllowance(NamedTuple):
    """Limits of a lossy rule for one request in one step.

    Attributes:
        max_log_ratio: nats that one promotion may give up: ln(1 / kappa), inf with another rule; None is strict.
        max_promotions: promotions in this step; None is no limit.
        max_regret: nats that this step's promotions may give up in all; inf is no limit.

    """

    max_log_ratio: float | None
    max_promotions: int | None
    max_regret: float

    @property
    def strict(self) -> bool:
        return self.max_log_ratio is None


STRICT = MarginAllowance(None, 0, 0.0)


def held_back_by(rule: LossyConfig, guard: GuardConfig, signal: RequestSignal) -> str | None:
    """The guard that keeps a request from some promotion that the rule allows, by its key; None where none does.

    A rule without a bound could always give up more than is left of a budget: that counts once nothing is left.
    """
    if signal.acceptance < guard.min_acceptance:
        return "min_acceptance"
    if guard.max_regret is not None:
        left, most = guard.max_regret - signal.regret, rule.max_loss
        if left <= 0.0 or (math.isfinite(most) and left < most):
            return "max_regret"
    return None


def allowance(rule: LossyConfig | None, guard: GuardConfig, signal: RequestSignal) -> MarginAllowance:
    """Strict without a rule, at kappa 1, below ``guard.min_acceptance`` and once ``guard.max_regret`` is used up.

    ``kappa = 1`` is strict itself and not "a child as probable as the target's choice": only then is it the same, bit
    for bit, where two tokens tie.
    """
    if rule is None or rule.lossless or signal.acceptance < guard.min_acceptance:
        return STRICT
    left = math.inf if guard.max_regret is None else guard.max_regret - signal.regret
    if left <= 0.0:
        return STRICT
    return MarginAllowance(rule.max_loss, rule.max_promotions_per_step, left)
