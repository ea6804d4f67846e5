"""Which tree is drafted in a step. No torch, no vLLM; the same inputs always give the same trees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from adaptivespec_vllm.config import AdaptiveSpecConfig
from adaptivespec_vllm.registry import POLICIES

if TYPE_CHECKING:
    from adaptivespec_vllm.policy.base import TreePolicy
    from adaptivespec_vllm.policy.costs import Costs
    from adaptivespec_vllm.policy.recording import Event, Mismatch


def make_policy(config: AdaptiveSpecConfig, costs: Costs | None = None) -> TreePolicy:
    """The policy that ``tree.policy`` names.

    Args:
        config: the settings.
        costs: what a step costs here, for a policy that asks. None is the file that ``tree.costs`` names; without
            that a stand-in, until ``costs`` of the policy is set.

    Raises:
        ConfigError: the file of costs cannot be used.

    """
    policy: TreePolicy = POLICIES.load(config.tree.policy).make(config, costs)
    return policy


def replay(events: Iterable[Event], config: AdaptiveSpecConfig) -> list[Mismatch]:
    """Make logged calls again under a configuration; empty when the log holds what the policy says."""
    from adaptivespec_vllm.policy.recording import replay as replay_with

    return replay_with(events, lambda costs: make_policy(config, costs))
