"""Lossy verification rules beside the margin rule: which drafted tokens may stand in for the target's choice."""

from __future__ import annotations

from adaptivespec_vllm.config import AdaptiveSpecConfig
from adaptivespec_vllm.registry import RULES
from adaptivespec_vllm.rules.base import Rule

__all__ = ["Rule", "make_rule"]


def make_rule(config: AdaptiveSpecConfig) -> Rule | None:
    """The rule that ``rule.name`` asks for; None without one: strict, or the margin rule, which the walk knows."""
    if config.rule is None:
        return None
    rule: Rule = RULES.load(config.rule.name)(config)
    return rule
