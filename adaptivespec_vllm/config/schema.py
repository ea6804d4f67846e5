"""The sections and keys, with type, bound, default and meaning; presets; contradictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from adaptivespec_vllm.config.base import METHOD, ConfigError, Section
from adaptivespec_vllm.config.lossy import LossyConfig, MarginConfig, RuleSection, rule_keys
from adaptivespec_vllm.config.tree import (
    MAX_EXPANDED_NODES,
    AdaptiveTree,
    Tree,
    TreeConfig,
    capacity,
    shape_faults,
    tree_keys,
)
from adaptivespec_vllm.registry import POLICIES
from adaptivespec_vllm.types import MAX_TREE_NODES


class SignalConfig(Section):
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


class GuardConfig(Section):
    """When a lossy rule is switched off for a request."""

    min_acceptance: float = Field(
        default=0.0, ge=0, le=1, description="Rolling acceptance below which a request is verified strictly."
    )
    max_regret: float | None = Field(
        default=None,
        gt=0,
        description="Log-probability (nats) that a request may give up in all before it is verified strictly; null is "
        "no limit.",
    )


class RequestsConfig(Section):
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

_PRESET_SCOPE: dict[str, str] = {"default": "request", "paper": "batch"}
_PRESET_PRUNING: dict[str, float] = {"default": 0.05, "paper": 0.0}
_PRESET_LOOKAHEAD: dict[str, bool] = {"default": True, "paper": False}


class AdaptiveSpecConfig(Section):
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
        "as published, and a margin that does not look ahead; neither preset turns the margin rule on.",
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TREE_NODES,
        description="Cap on draft nodes of a request in a step, the root not counted; null is the largest `nodes` of "
        "the configured shapes. Shapes that come from a preset are cut to it.",
    )
    tree: Tree = Field(default_factory=TreeConfig, description="Which tree is drafted.")
    signal: SignalConfig = Field(default_factory=SignalConfig, description="How confident a request looks.")
    margin: MarginConfig | None = Field(
        default=None, description="The lossy rule; absent or null is lossless, `{}` is the rule at its defaults."
    )
    rule: RuleSection = Field(
        default=None, description="A lossy rule of another method, in the place of `margin`; absent or null is none."
    )
    guard: GuardConfig = Field(
        default_factory=GuardConfig,
        description="When a lossy rule stops; without `margin` or `rule` it has nothing to stop.",
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
        return max(shape.nodes for _, shape in self.tree.bounds())

    @property
    def max_depth(self) -> int:
        """Levels of the deepest tree that can be asked for."""
        return max(shape.depth for _, shape in self.tree.bounds())

    @property
    def max_width(self) -> int:
        """Width of the widest tree that can be asked for."""
        return max(shape.width for _, shape in self.tree.bounds())

    @property
    def lossy(self) -> LossyConfig | None:
        """The lossy rule, whichever it is; None is strict."""
        return self.rule if self.rule is not None else self.margin

    @property
    def lossless(self) -> bool:
        """Whether only the target's own choices are accepted."""
        return self.lossy is None or self.lossy.lossless

    @property
    def verification(self) -> str:
        """What is accepted, in a sentence for people."""
        if self.lossy is None or self.lossless:
            return "lossless: only the target's own choices are accepted"
        return f"lossy: {self.lossy.says}; the text differs from plain decoding"

    def to_resolved_dict(self) -> dict[str, Any]:
        """Every key with the value it has in the end, ready for JSON and for :func:`resolve`."""
        resolved = self.model_dump(mode="json")
        resolved["num_speculative_tokens"] = self.max_nodes
        used = ("policy", *self.tree.keys)
        resolved["tree"] = {key: value for key, value in resolved["tree"].items() if key in used}
        return resolved


def _with_preset(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with the preset's values where nothing is written out."""
    filled = dict(options)
    preset = options.get("preset", "default")
    tree = options.get("tree", {})
    if preset not in list(_PRESET_SCOPE) or not isinstance(tree, Mapping):
        return filled  # validation names the fault
    if isinstance(margin := options.get("margin"), Mapping):
        filled["margin"] = {"lookahead": _PRESET_LOOKAHEAD[preset], **margin}
    policy = tree.get("policy", _policy_meant(preset, tree))
    if policy not in POLICIES:
        return filled
    keys = tree_keys(policy)
    for name in TreeConfig.model_fields:
        if name not in ("policy", *keys.keys) and tree.get(name) is not None:
            raise ConfigError(
                f"tree.{name}: not allowed with tree.policy {policy!r}; allowed there: {', '.join(keys.keys)}"
            )
    merged: dict[str, Any] = {"policy": policy}
    if policy == "adaptive":
        merged |= {"scope": _PRESET_SCOPE[preset], "min_path_probability": _PRESET_PRUNING[preset]}
    merged |= tree
    chain = _verifies_chains(options)
    for name, values in keys.shapes.items():
        explicit = tree.get(name, {})
        if name == "shape" and explicit is None:
            explicit = {}  # null is its default
        if chain:
            values = {"depth": values["depth"], "width": 1, "nodes": values["depth"]}
        merged[name] = _preset_shape(values, explicit, options.get("num_speculative_tokens"))
    filled["tree"] = merged
    return filled


def _verifies_chains(options: Mapping[str, Any]) -> bool:
    """Whether the lossy rule that is asked for takes no trees, so that a shape that is not written out is a chain."""
    rule = options.get("rule")
    return isinstance(rule, Mapping) and rule_keys(rule.get("name")).chains_only


def _policy_meant(preset: str, tree: Mapping[str, Any]) -> str:
    """The policy where none is written: the one that a key which is written belongs to."""
    adaptive = preset == "paper" or any(key in tree for key in AdaptiveTree.keys)
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
            shape["nodes"] = min(shape["nodes"], capacity(shape["depth"], shape["width"]))
    return shape


def _contradictions(config: AdaptiveSpecConfig) -> Iterator[str]:
    yield from config.tree.faults()
    cap = config.num_speculative_tokens
    for path, shape in config.tree.bounds():
        if cap is not None and shape.nodes > cap:
            key = path if path == "tree.lengths" else f"{path}.nodes"
            yield f"{key}: got {shape.nodes}, above num_speculative_tokens; allowed: at most {cap}"
        yield from shape_faults(path, shape)
    yield from _rule_faults(config)


def _rule_faults(config: AdaptiveSpecConfig) -> Iterator[str]:
    rule = config.rule
    if rule is None:
        return
    if config.margin is not None:
        yield f"margin: not allowed with rule {rule.name!r}; allowed: one of the two"
    for path, shape in config.tree.bounds():
        if rule.chains_only and shape.width > 1:
            yield f"{path}.width: got {shape.width}; rule {rule.name!r} verifies chains only; allowed: 1"
    yield from rule.faults(config.max_depth)
