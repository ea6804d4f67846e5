"""The signal of a request: rolling acceptance, confidence, circuit breaker. Pure functions of plain numbers."""

from __future__ import annotations

from adaptivespec_vllm.config import SignalConfig
from adaptivespec_vllm.types import RequestSignal, StepFeedback


def rolling_acceptance(acceptance: float, accepted: int, drafted_depth: int, alpha: float) -> float:
    """RAR after a step: exponential average of accepted / drafted depth.

    Promoted tokens count as accepted. A step that drafted nothing says nothing and leaves it as it is.
    """
    if drafted_depth <= 0:
        return acceptance
    return (1.0 - alpha) * acceptance + alpha * min(1.0, accepted / drafted_depth)


def confidence_signal(confidence: float, acceptance: float) -> float:
    """DCS: the draft's probability of its own first choice at the root, times RAR; in [0, 1]."""
    return _unit(confidence) * _unit(acceptance)


def strength(dcs: float, divisor: float) -> float:
    """``s`` in [0, 1]: 0 asks for the low-confidence shape, 1 for the high-confidence one."""
    return _unit(dcs / divisor)


def breaker(misses: int, tripped: bool, accepted: int, drafted_nodes: int, steps: int) -> tuple[int, bool]:
    """Misses in a row and whether the breaker is open, after a step.

    It opens after ``steps`` drafting steps in a row with nothing accepted and closes with the first accepted token.
    """
    if accepted > 0:
        return 0, False
    if drafted_nodes <= 0:
        return misses, tripped
    return misses + 1, tripped or misses + 1 >= steps


def observe(signal: RequestSignal, feedback: StepFeedback, config: SignalConfig) -> None:
    """Bring a request's signal up to date with what a step gave."""
    signal.acceptance = rolling_acceptance(signal.acceptance, feedback.accepted, feedback.drafted_depth, config.alpha)
    signal.misses, signal.tripped = breaker(
        signal.misses, signal.tripped, feedback.accepted, feedback.drafted_nodes, config.breaker_steps
    )
    signal.regret += feedback.regret


def _unit(value: float) -> float:
    """``value`` within [0, 1]; what is not a number asks for nothing."""
    return min(1.0, value) if value > 0.0 else 0.0
