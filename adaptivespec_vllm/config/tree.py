"""The section ``tree``: shapes, and the keys that each policy knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny

from adaptivespec_vllm.config.base import Section
from adaptivespec_vllm.registry import POLICIES
from adaptivespec_vllm.types import MAX_TREE_NODES, TreeShape

MAX_EXPANDED_NODES = 63
"""Nodes that the head can expand in one step below the first level: ``width * (depth - 1)`` stays within it."""


class ShapeConfig(Section):
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
        return capacity(self.depth, self.width)


class TreeConfig(Section):
    """Which tree is drafted in a step; base of the keys that each policy knows.

    Attributes:
        keys: of these, the ones that mean something to the policy, and its own.
        shapes: of each key that holds a shape, the numbers that are not written out.

    """

    keys: ClassVar[tuple[str, ...]] = ()
    shapes: ClassVar[Mapping[str, Mapping[str, int]]] = {}

    policy: Annotated[str, AfterValidator(POLICIES.check), POLICIES] = Field(
        default="cost-aware",
        description="`cost-aware` drafts what gains more tokens than its time is worth; `adaptive` moves between `low` "
        "and `high` with the signal; `static` always asks for `shape`; the others are those of other methods, see "
        "[rules.md](rules.md).",
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
        description="The largest tree of `cost-aware`, `talon` and `ddd`; the one shape of `static`, required there; "
        "not with `adaptive` and `sglang-adaptive`.",
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
        "are dropped before they are verified; only with `adaptive` and `static`.",
    )

    def bounds(self) -> list[tuple[str, ShapeConfig]]:
        """The largest trees that can be asked for, by the keys they come from."""
        named = [("tree.low", self.low), ("tree.high", self.high), ("tree.shape", self.shape)]
        return [(path, shape) for path, shape in named if shape is not None]

    @property
    def expanded_nodes(self) -> int:
        """Nodes that the head may run over for a request in a step, at most."""
        shapes = [shape for _, shape in self.bounds()]
        most = max(shape.width for shape in shapes) * (max(shape.depth for shape in shapes) - 1)
        return min(most, MAX_EXPANDED_NODES)

    def faults(self) -> Iterator[str]:
        """What makes the keys contradict each other, each in a sentence that names its key."""
        for name in ("low", "high", "shape"):
            if name in self.keys and getattr(self, name) is None:
                yield (
                    f"tree.{name}: missing; tree.policy {self.policy!r} needs an object with the keys "
                    "depth, width, nodes"
                )


class CostAwareTree(TreeConfig):
    """What `cost-aware` knows."""

    keys = ("shape", "costs")
    shapes: ClassVar[Mapping[str, Mapping[str, int]]] = {"shape": {"depth": 8, "width": 4, "nodes": 24}}


class AdaptiveTree(TreeConfig):
    """What `adaptive` knows."""

    keys = ("scope", "low", "high", "min_path_probability")
    shapes: ClassVar[Mapping[str, Mapping[str, int]]] = {
        "low": {"depth": 3, "width": 4, "nodes": 3},
        "high": {"depth": 7, "width": 1, "nodes": 7},
    }


class StaticTree(TreeConfig):
    """What `static` knows (`scope`: whatever it is, the shape is one)."""

    keys = ("shape", "scope", "min_path_probability")


def capacity(depth: int, width: int) -> int:
    """Most nodes that a tree of this depth and width can propose."""
    return width + (depth - 1) * width**2


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


def tree_keys(policy: Any) -> type[TreeConfig]:
    """The keys of ``tree`` with a policy; of one that does not exist, those that all have."""
    keys: type[TreeConfig] = POLICIES.load(policy).Tree if policy in POLICIES else TreeConfig
    return keys


def _as_tree(tree: Any) -> Any:
    return tree_keys(tree.get("policy", "cost-aware")).model_validate(dict(tree)) if isinstance(tree, Mapping) else tree


Tree = Annotated[SerializeAsAny[TreeConfig], BeforeValidator(_as_tree)]
"""The section as a field: its class is the one of its policy."""
