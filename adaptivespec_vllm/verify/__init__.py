"""The walk from the root of each tree: exact matches, margin promotions, the stop."""

from adaptivespec_vllm.verify.greedy import verify_greedy
from adaptivespec_vllm.verify.limits import RequestMargin, margin_limits
from adaptivespec_vllm.verify.stepwise import StepwiseWalk

__all__ = ["RequestMargin", "StepwiseWalk", "margin_limits", "verify_greedy"]
