"""The sections and keys, with type, bound, default and meaning; presets; contradictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from adaptivespec_vllm.types import MAX_TREE_NODES, TreeShape

METHOD: Final = "adaptivespec"
"""The value of ``method`` that asks for this package."""

MAX_EXPANDED_NODES = 63
"""Nodes that the head can expand in one step below the first level: ``width * (depth - 1)`` stays within it."""


class ConfigError(ValueError):
    """A configuration that cannot be used: names the key, what was given and what is allowed."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ShapeConfig(_Section):
    """Bounds of one draft tree."""

    depth: int = Field(ge=1, le=MAX_TREE_NODES, description="Levels of draft nodes below the root.")
    width: int = Field(
        ge=1,
        le=MAX_TREE_NODES,
        description="Nodes of a level that are expanded, and children that each of them proposes.",
    )
    nodes: int = Field(ge=1, le=MAX_TREE_NODES, description="Draft nodes kept in all; the root is never counted.")

    def tree_shape(self) -> TreeShape:
        """The same three numbers as the hand-over type."""
        return TreeShape(self.depth, self.width, self.nodes)

    def capacity(self) -> int:
        """Most nodes that such a tree can propose: ``width`` on level 1, ``width ** 2`` on each deeper one."""
        return _capacity(self.depth, self.width)


class TreeConfig(_Section):
    """Which tree is drafted in a step."""

    policy: Literal["cost-aware", "adaptive", "static"] = Field(
        default="cost-aware",
        description="`cost-aware` drafts what gains more tokens than its time is worth; `adaptive` moves between `low` "
        "and `high` with the signal; `static` always asks for `shape`.",
    )
    scope: Literal["request", "batch"] = Field(
        default="request",
        description="`request` chooses a shape for each request; `batch` one shape for all, from the mean signal; only "
        "with `adaptive`.",
    )
    low: ShapeConfig | None = Field(
        default=None, description="Shape at no confidence (shallow, wide); only with `adaptive`."
    )
    high: ShapeConfig | None = Field(
        default=None, description="Shape at full confidence (deep, narrow); only with `adaptive`."
    )
    shape: ShapeConfig | None = Field(
        default=None,
        description="The largest tree of `cost-aware`; the one shape of `static`, required there; not with `adaptive`.",
    )
    costs: str | None = Field(
        default=None,
        min_length=1,
        description="File of what a step costs here (JSON), see below; null is measured at start. Only with "
        "`cost-aware`.",
    )
    min_path_probability: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Draft nodes whose path probability (product of draft probabilities from the root) is below this "
        "are dropped before they are verified; not with `cost-aware`.",
    )


class SignalConfig(_Section):
    """How confident a request looks: draft confidence times rolling acceptance."""

    alpha: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="Weight of the newest step in the rolling acceptance (accepted / drafted depth).",
    )
    initial: float = Field(default=0.5, ge=0, le=1, description="Rolling acceptance of a new request.")
    divisor: float = Field(
        default=0.5, gt=0, le=1, description="Confidence times acceptance that already counts as full confidence."
    )
    breaker_steps: int = Field(
        default=5,
        ge=1,
        le=1_000_000,
        description="Steps in a row with nothing accepted before the request falls back to `low`, until something is "
        "accepted again.",
    )


class MarginConfig(_Section):
    """The lossy margin rule; without this section verification is lossless."""

    kappa: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="A draft token that is not the target's choice is accepted when its probability is at least "
        "`kappa` times that of the target's choice; 1 is lossless.",
    )
    max_promotions_per_step: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TREE_NODES,
        description="Most such acceptances of one request in one step; null is no limit.",
    )


class GuardConfig(_Section):
    """When the margin rule is switched off for a request."""

    min_acceptance: float = Field(
        default=0.0, ge=0, le=1, description="Rolling acceptance below which a request is verified strictly."
    )
    max_regret: float | None = Field(
        default=None,
        gt=0,
        description="Log-probability (nats) that a request may give up in all before it is verified strictly; null is "
        "no limit.",
    )


class RequestsConfig(_Section):
    """What a request may change for itself; see ``docs/requests.md``."""

    overrides: bool = Field(
        default=True,
        description="Whether a request may set `adaptivespec_margin`, `adaptivespec_max_nodes` and "
        "`adaptivespec_shape` for itself; false answers one that does with an error.",
    )
    looser_margin: bool = Field(
        default=False,
        description="Whether `adaptivespec_margin` may be looser than `margin` here, or turn the margin rule on.",
    )


Preset = Literal["default", "paper"]

_PRESET_SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "cost-aware": {"shape": {"depth": 8, "width": 4, "nodes": 24}},
    "adaptive": {"low": {"depth": 3, "width": 4, "nodes": 3}, "high": {"depth": 7, "width": 1, "nodes": 7}},
    "static": {},
}
_KEYS_OF_POLICY: dict[str, tuple[str, ...]] = {
    "cost-aware": ("shape", "costs"),
    "adaptive": ("scope", "low", "high", "min_path_probability"),
    "static": ("shape", "scope", "min_path_probability"),
}
"""Keys of ``tree`` that mean something to each policy (``scope`` of ``static``: whatever it is, the shape is one)."""
_PRESET_SCOPE: dict[str, str] = {"default": "request", "paper": "batch"}
_PRESET_PRUNING: dict[str, float] = {"default": 0.05, "paper": 0.0}


class AdaptiveSpecConfig(_Section):
    """All settings of the method, resolved."""

    method: Literal["adaptivespec"] = Field(default=METHOD, description="Asks for this method.")
    model: str | None = Field(
        default=None,
        min_length=1,
        description="EAGLE-3 head: a directory or a hub id. Required when decoding.",
    )
    preset: Preset = Field(
        default="default",
        description="Values of what is not written out. `paper`: policy `adaptive`, one shape a batch and no pruning, "
        "as published; neither preset turns the margin rule on.",
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TREE_NODES,
        description="Cap on draft nodes of a request in a step, the root not counted; null is the largest `nodes` of "
        "the configured shapes. Shapes that come from a preset are cut to it.",
    )
    tree: TreeConfig = Field(default_factory=TreeConfig, description="Which tree is drafted.")
    signal: SignalConfig = Field(default_factory=SignalConfig, description="How confident a request looks.")
    margin: MarginConfig | None = Field(
        default=None, description="The lossy rule; absent or null is lossless, `{}` is the rule at its defaults."
    )
    guard: GuardConfig = Field(
        default_factory=GuardConfig,
        description="When the margin rule stops; without `margin` it has nothing to stop.",
    )
    requests: RequestsConfig = Field(
        default_factory=RequestsConfig, description="What a request may change for itself."
    )
    attention: Literal["auto", "flash", "triton", "xformers"] = Field(
        default="auto",
        description="How attention of tree rows is computed on a GPU, see `docs/cuda.md`; on a CPU only `auto`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, options: Any) -> Any:
        return _with_preset(options) if isinstance(options, Mapping) else options

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> AdaptiveSpecConfig:
        for contradiction in _contradictions(self):
            raise ConfigError(contradiction)
        return self

    @property
    def max_nodes(self) -> int:
        """Cap on draft nodes of a request in a step."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return max(shape.nodes for _, shape in _shapes(self.tree))

    @property
    def max_depth(self) -> int:
        """Levels of the deepest tree that can be asked for."""
        return max(shape.depth for _, shape in _shapes(self.tree))

    @property
    def max_width(self) -> int:
        """Width of the widest tree that can be asked for."""
        return max(shape.width for _, shape in _shapes(self.tree))

    @property
    def lossless(self) -> bool:
        """Whether only the target's own choices are accepted."""
        return self.margin is None or self.margin.kappa == 1.0

    @property
    def verification(self) -> str:
        """What is accepted, in a sentence for people."""
        if self.margin is None or self.lossless:
            return "lossless: only the target's own choices are accepted"
        return (
            f"lossy: a draft token is accepted from {self.margin.kappa} times the probability of the target's choice; "
            "the text differs from plain decoding"
        )

    def to_resolved_dict(self) -> dict[str, Any]:
        """Every key with the value it has in the end, ready for JSON and for :func:`resolve`."""
        resolved = self.model_dump(mode="json")
        resolved["num_speculative_tokens"] = self.max_nodes
        used = ("policy", *_KEYS_OF_POLICY[self.tree.policy])
        resolved["tree"] = {key: value for key, value in resolved["tree"].items() if key in used}
        return resolved


def _with_preset(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with the preset's values where nothing is written out."""
    filled = dict(options)
    preset = options.get("preset", "default")
    tree = options.get("tree", {})
    if preset not in list(_PRESET_SCOPE) or not isinstance(tree, Mapping):
        return filled  # validation names the fault
    policy = tree.get("policy", _policy_meant(preset, tree))
    if policy not in list(_KEYS_OF_POLICY):
        return filled
    allowed = _KEYS_OF_POLICY[policy]
    for name in TreeConfig.model_fields:
        if name not in ("policy", *allowed) and tree.get(name) is not None:
            raise ConfigError(
                f"tree.{name}: not allowed with tree.policy {policy!r}; allowed there: {', '.join(allowed)}"
            )
    merged: dict[str, Any] = {"policy": policy}
    if policy == "adaptive":
        merged |= {"scope": _PRESET_SCOPE[preset], "min_path_probability": _PRESET_PRUNING[preset]}
    merged |= tree
    for name, values in _PRESET_SHAPES[policy].items():
        explicit = tree.get(name, {})
        if name == "shape" and explicit is None:
            explicit = {}  # null is its default
        merged[name] = _preset_shape(values, explicit, options.get("num_speculative_tokens"))
    filled["tree"] = merged
    return filled


def _policy_meant(preset: str, tree: Mapping[str, Any]) -> str:
    """The policy where none is written: the one that a key which is written belongs to."""
    adaptive = preset == "paper" or any(key in tree for key in _KEYS_OF_POLICY["adaptive"])
    return "adaptive" if adaptive else "cost-aware"


def _preset_shape(preset: Mapping[str, int], explicit: Any, cap: Any) -> Any:
    """A preset's shape under the numbers that are written out, and under the cap."""
    if not isinstance(explicit, Mapping):
        return explicit
    shape = {**preset, **explicit}
    if "nodes" not in explicit and type(cap) is int and cap >= 1:
        shape["nodes"] = min(shape["nodes"], cap)
    if "depth" not in explicit and type(shape["nodes"]) is int and shape["nodes"] >= 1:
        shape["depth"] = min(shape["depth"], shape["nodes"])
    if all(type(shape[key]) is int and shape[key] >= 1 for key in ("depth", "width")):
        if "width" not in explicit and shape["depth"] > 1:
            shape["width"] = max(1, min(shape["width"], MAX_EXPANDED_NODES // (shape["depth"] - 1)))
        if "nodes" not in explicit:
            shape["nodes"] = min(shape["nodes"], _capacity(shape["depth"], shape["width"]))
    return shape


def _capacity(depth: int, width: int) -> int:
    return width + (depth - 1) * width**2


def _shapes(tree: TreeConfig) -> list[tuple[str, ShapeConfig]]:
    named = [("tree.low", tree.low), ("tree.high", tree.high), ("tree.shape", tree.shape)]
    return [(path, shape) for path, shape in named if shape is not None]


def _contradictions(config: AdaptiveSpecConfig) -> Iterator[str]:
    yield from _missing_shapes(config.tree)
    cap = config.num_speculative_tokens
    for path, shape in _shapes(config.tree):
        if cap is not None and shape.nodes > cap:
            yield f"{path}.nodes: got {shape.nodes}, above num_speculative_tokens; allowed: at most {cap}"
        yield from shape_faults(path, shape)


def shape_faults(path: str, shape: ShapeConfig) -> Iterator[str]:
    """What makes the three numbers contradict each other, each in a sentence that names its key."""
    if shape.nodes < shape.depth:
        yield (
            f"{path}.nodes: got {shape.nodes}, fewer than the {shape.depth} levels of {path}.depth; "
            f"allowed: at least {shape.depth}"
        )
    if shape.nodes > shape.capacity():
        yield (
            f"{path}.nodes: got {shape.nodes}, more than depth {shape.depth} and width {shape.width} can hold; "
            f"allowed: at most {shape.capacity()}"
        )
    if shape.width * (shape.depth - 1) > MAX_EXPANDED_NODES:
        widest = MAX_EXPANDED_NODES // (shape.depth - 1)
        yield (
            f"{path}.width: got {shape.width}, too many nodes to expand at depth {shape.depth}; "
            f"allowed: at most {widest} (width * (depth - 1) <= {MAX_EXPANDED_NODES})"
        )


def _missing_shapes(tree: TreeConfig) -> Iterator[str]:
    for name in ("low", "high") if tree.policy == "adaptive" else ("shape",):
        if getattr(tree, name) is None:
            yield (
                f"tree.{name}: missing; tree.policy {tree.policy!r} needs an object with the keys depth, width, nodes"
            )
