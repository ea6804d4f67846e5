"""Which tree is drafted in a step. No torch, no vLLM; the same inputs always give the same trees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from adaptivespec_vllm.config import AdaptiveSpecConfig

if TYPE_CHECKING:
    from adaptivespec_vllm.policy.base import Decision, Mismatch, TreePolicy


def make_policy(config: AdaptiveSpecConfig) -> TreePolicy:
    """The policy that ``tree.policy`` names."""
    if config.tree.policy == "static":
        from adaptivespec_vllm.policy.static import StaticPolicy

        return StaticPolicy(config)
    from adaptivespec_vllm.policy.adaptive import AdaptivePolicy

    return AdaptivePolicy(config)


def replay(decisions: Iterable[Decision], config: AdaptiveSpecConfig) -> list[Mismatch]:
    """Compute logged decisions again under a configuration; empty when the log holds what the policy says."""
    from adaptivespec_vllm.policy.base import replay as replay_with

    return replay_with(decisions, make_policy(config))
