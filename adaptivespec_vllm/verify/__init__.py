"""The walk from the root of each tree: exact matches, margin promotions, the stop."""

from adaptivespec_vllm.verify.greedy import acceptable_part, verify_greedy
from adaptivespec_vllm.verify.limits import RequestMargin, looking_ahead, margin_limits
from adaptivespec_vllm.verify.lookahead import worthwhile_part
from adaptivespec_vllm.verify.stepwise import StepwiseWalk

__all__ = [
    "RequestMargin",
    "StepwiseWalk",
    "acceptable_part",
    "looking_ahead",
    "margin_limits",
    "verify_greedy",
    "worthwhile_part",
]
