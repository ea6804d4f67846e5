"""What a request may change for itself: the keys ``adaptivespec_*`` of ``SamplingParams.extra_args``.

Over HTTP they are keys of ``vllm_xargs``. ``docs/requests.md`` says what each one means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaptivespec_vllm.config import (
    METHOD,
    AdaptiveSpecConfig,
    LossyConfig,
    MarginConfig,
    ShapeConfig,
    key_error,
    shape_faults,
    shown,
)
from adaptivespec_vllm.policy.shape import bounded
from adaptivespec_vllm.types import NO_TREE, TreeShape

PREFIX = f"{METHOD}_"
"""Keys that begin with it are ours; all others are none of our business."""

MARGIN, MAX_NODES, SHAPE = KEYS = tuple(f"{PREFIX}{name}" for name in ("margin", "max_nodes", "shape"))


class OverrideError(ValueError):
    """An override that cannot be used: names the key, what was given and what is allowed."""

    def __init__(self, key: str, given: Any, allowed: str) -> None:
        super().__init__(f"{key}: got {shown(given)}; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class Overrides:
    """How one request is drafted and verified.

    Attributes:
        margin: its lossy rule, that of the server unless the request has another; None is strict.
        shape: its largest tree, in the place of the policy's; None is the policy's.
        max_nodes: cap on its draft nodes in a step; 0 drafts nothing, None is no cap but the server's.

    """

    margin: LossyConfig | None
    shape: TreeShape | None = None
    max_nodes: int | None = None

    @property
    def drafts(self) -> bool:
        """Whether the request may draft at all."""
        return self.max_nodes != 0

    def bound(self, shape: TreeShape) -> TreeShape:
        """The largest tree of the request in a step where the policy gives it ``shape``."""
        if not shape.nodes or not self.drafts:
            return NO_TREE
        shape = self.shape or shape
        return shape if self.max_nodes is None else bounded(shape, self.max_nodes)


def overrides_of(extra_args: Mapping[str, Any] | None, settings: AdaptiveSpecConfig) -> Overrides:
    """Read the overrides of a request.

    Raises:
        ValueError: for a key or a value that is not allowed, by name.

    """
    given = {key: value for key, value in (extra_args or {}).items() if key.startswith(PREFIX)}
    for key, value in given.items():
        if not settings.requests.overrides:
            raise OverrideError(key, value, "nothing, because this server has requests.overrides switched off")
        if key not in KEYS:
            raise key_error(key, KEYS)
    return Overrides(
        margin=_margin(given[MARGIN], settings) if MARGIN in given else settings.lossy,
        shape=_shape(given[SHAPE], settings) if SHAPE in given else None,
        max_nodes=_max_nodes(given[MAX_NODES], settings.max_nodes) if MAX_NODES in given else None,
    )


def _margin(value: Any, settings: AdaptiveSpecConfig) -> LossyConfig | None:
    """0 and 'off' are strict; any other value is a kappa, and larger is stricter."""
    if settings.rule is not None:
        if value == "off" or (value in (0, 1) and not isinstance(value, bool)):
            return None
        name = settings.rule.name
        raise OverrideError(
            MARGIN, value, f"0, 1 or 'off' for strict, because this server's rule {name!r} has no kappa"
        )
    least = 1.0 if settings.margin is None else settings.margin.kappa
    if settings.requests.looser_margin:
        allowed = "0 or 'off' for strict, or a kappa above 0 and at most 1"
    elif settings.lossless:
        allowed = "0, 1 or 'off', because this server is strict"
    else:
        allowed = f"0 or 'off' for strict, or a kappa from the server's {least} to 1"
    if value == "off":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise OverrideError(MARGIN, value, allowed)
    if value == 0:
        return None
    if value < least and not settings.requests.looser_margin:
        raise OverrideError(MARGIN, value, allowed)
    if settings.margin is None:
        return MarginConfig(kappa=float(value))
    return settings.margin.model_copy(update={"kappa": float(value)})


def _max_nodes(value: Any, cap: int) -> int:
    if type(value) is not int or not 0 <= value <= cap:
        raise OverrideError(MAX_NODES, value, f"an integer from 0 to {cap}")
    return value


def _shape(value: Any, settings: AdaptiveSpecConfig) -> TreeShape:
    """Within the server's own bounds, for which KV slots are reserved and memory is counted at start."""
    most = TreeShape(settings.max_depth, settings.max_width, settings.max_nodes)
    numbers = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        numbers = [int(part) if part.isascii() and part.isdigit() and len(part) <= 3 else None for part in parts]
    if (
        not isinstance(numbers, (list, tuple))
        or len(numbers) != 3
        or any(type(n) is not int or not 1 <= n <= largest for n, largest in zip(numbers, most, strict=True))
    ):
        allowed = f"'depth,width,nodes' or [depth, width, nodes], integers from 1 to this server's {list(most)}"
        raise OverrideError(SHAPE, value, allowed)
    shape = ShapeConfig(**dict(zip(ShapeConfig.model_fields, numbers, strict=True)))
    for fault in shape_faults(SHAPE, shape):
        raise ValueError(fault)
    return shape.tree_shape()
