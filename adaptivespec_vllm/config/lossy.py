"""The sections ``margin`` and ``rule``: what is accepted besides the target's own choices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny

from adaptivespec_vllm.config.base import Section
from adaptivespec_vllm.registry import RULES
from adaptivespec_vllm.types import MAX_TREE_NODES


class LossyConfig(Section):
    """A rule that accepts more than the target's own choices.

    Attributes:
        chains_only: trees are not allowed.

    """

    chains_only: ClassVar[bool] = False

    max_promotions_per_step: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TREE_NODES,
        description="Most such acceptances of one request in one step; null is no limit.",
    )

    @property
    def lossless(self) -> bool:
        """Whether it accepts nothing but the target's own choices all the same."""
        return False

    @property
    def max_loss(self) -> float:
        """Nats that one acceptance can give up at the most."""
        return math.inf

    @property
    def looks_ahead(self) -> bool:
        """Whether what follows a promotion has to be worth it."""
        return False

    @property
    def says(self) -> str:
        """What is accepted, in a phrase for people."""
        raise NotImplementedError

    def faults(self, depth: int) -> Iterator[str]:
        """What makes the keys contradict trees of at most ``depth`` levels, each in a sentence that names its key."""
        yield from ()


class MarginConfig(LossyConfig):
    """The lossy margin rule; without this section verification is lossless."""

    kappa: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="A draft token that is not the target's choice is accepted when its probability is at least "
        "`kappa` times that of the target's choice; 1 is lossless.",
    )
    lookahead: bool = Field(
        default=True,
        description="Whether such a token must also be worth it: a token more for each half of the log-probability "
        "that `kappa` allows; a match may be passed over for a longer path. See [rules.md](rules.md#looking-ahead).",
    )

    @property
    def lossless(self) -> bool:
        return self.kappa == 1.0

    @property
    def max_loss(self) -> float:
        return math.log(1.0 / self.kappa)

    @property
    def looks_ahead(self) -> bool:
        return self.lookahead

    @property
    def says(self) -> str:
        worth = " where it brings enough tokens" if self.lookahead else ""
        return f"a draft token is accepted from {self.kappa} times the probability of the target's choice{worth}"


class RuleConfig(LossyConfig):
    """Another lossy rule in the place of the margin; base of the keys that each rule knows."""

    name: Annotated[str, AfterValidator(RULES.check), RULES] = Field(
        description="Which lossy rule of another method accepts draft tokens; the rest of the section is its own. See "
        "[rules.md](rules.md)."
    )


def rule_keys(name: Any) -> type[RuleConfig]:
    """The keys of ``rule`` with a rule; of one that does not exist, those that all have."""
    keys: type[RuleConfig] = RULES.load(name).Config if name in RULES else RuleConfig
    return keys


def _as_rule(rule: Any) -> Any:
    return rule_keys(rule.get("name")).model_validate(dict(rule)) if isinstance(rule, Mapping) else rule


RuleSection = Annotated[SerializeAsAny[RuleConfig] | None, BeforeValidator(_as_rule)]
"""The section as a field: its class is the one of its rule."""
