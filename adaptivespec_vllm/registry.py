"""Verification rules and tree policies by name; the one place where a new one is registered.

A name leads to a class that is imported when it is first asked for, so that a configuration costs no more than what it
names. ``docs/adding_a_rule.md`` and ``docs/adding_a_policy.md`` show how to add one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any


class Registry:
    """Classes by name.

    Args:
        entries: of each name the class, or where it is (``"package.module:Class"``).

    """

    def __init__(self, entries: dict[str, str]) -> None:
        self._entries: dict[str, Any] = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def add(self, name: str, entry: Any) -> None:
        """Register a class, or where it is; in every process that reads a configuration.

        Raises:
            ValueError: the name is taken.

        """
        if name in self._entries:
            raise ValueError(f"{name!r} is registered already")
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Forget a name."""
        del self._entries[name]

    def load(self, name: str) -> Any:
        """The class of a name.

        Raises:
            KeyError: nothing has this name.

        """
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, member = entry.partition(":")
            entry = self._entries[name] = getattr(importlib.import_module(module), member)
        return entry

    def check(self, name: str) -> str:
        """``name`` itself, for validation.

        Raises:
            ValueError: nothing has this name.

        """
        if name not in self:
            raise ValueError(f"allowed: {', '.join(self)}")
        return name


RULES = Registry(
    {
        "mars": "adaptivespec_vllm.rules.mars:Mars",
        "fly": "adaptivespec_vllm.rules.fly:Fly",
        "typical": "adaptivespec_vllm.rules.typical:Typical",
    }
)
"""Lossy rules that ``rule.name`` may ask for, each a ``rules.base.Rule``; the margin rule has a section of its own."""

POLICIES = Registry(
    {
        "cost-aware": "adaptivespec_vllm.policy.cost_aware:CostAwarePolicy",
        "adaptive": "adaptivespec_vllm.policy.adaptive:AdaptivePolicy",
        "static": "adaptivespec_vllm.policy.static:StaticPolicy",
        "talon": "adaptivespec_vllm.policy.talon:TalonPolicy",
        "ddd": "adaptivespec_vllm.policy.ddd:DddPolicy",
        "sglang-adaptive": "adaptivespec_vllm.policy.sglang:SglangPolicy",
    }
)
"""What ``tree.policy`` may ask for, each a ``policy.base.TreePolicy``."""
