"""What the arms of a simulation come to, and how the choice follows the costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from adaptivespec_vllm.bench.arms import PLAIN, Arm
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.result import ALL_KINDS
from adaptivespec_vllm.config import METHOD, AdaptiveSpecConfig, load, resolve
from adaptivespec_vllm.policy import make_policy
from adaptivespec_vllm.policy.base import TreePolicy
from adaptivespec_vllm.policy.costs import Costs
from adaptivespec_vllm.simulate.recording import CHILDREN, Recording
from adaptivespec_vllm.simulate.replay import Tally, replay
from adaptivespec_vllm.simulate.search import DEPTHS, Found, Search

FACTORS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""How dear rows, or passes of the head, are made for the plot of the choice."""

_OPTION = "--arms"


@dataclass(frozen=True)
class Figures:
    """One arm on one kind of texts."""

    tokens_per_second: float
    vs_plain: float
    accepted_length: float
    """Tokens a step of a request, the target's own included."""
    depth: float
    width: float
    nodes: float
    """Of the tree of a step, the root not counted."""
    unrecorded: int
    """Nodes that were expanded and that the recording does not know; they count as drafted in vain."""

    @staticmethod
    def of(tally: Tally, plain: float) -> Figures:
        """From a tally, and the speed of plain decoding."""
        speed = tally.tokens / tally.seconds
        tokens, depth, width, nodes = (
            value / tally.steps for value in (tally.tokens, tally.depth, tally.width, tally.nodes)
        )
        return Figures(speed, speed / plain, tokens, depth, width, nodes, tally.unrecorded)


@dataclass(frozen=True)
class Best:
    """A static shape that is the fastest on a kind of texts, found by trying all of the grid."""

    shape: list[int]
    vs_plain: float


@dataclass
class Simulated:
    """All arms at one batch size.

    Attributes:
        batch: requests decoded together.
        arms: by arm and kind (and all kinds together); in the order given.
        best_chain: by kind.
        best_tree: by kind; of all shapes, chains among them.
        best_of_each: by kind, times plain decoding: every text (of larger batches: every kind) with the static shape
            that is fastest for it, known in hindsight.

    """

    batch: int
    arms: dict[str, dict[str, Figures]] = field(default_factory=dict)
    best_chain: dict[str, Best] = field(default_factory=dict)
    best_tree: dict[str, Best] = field(default_factory=dict)
    best_of_each: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def policy_maker(arm: Arm) -> Callable[[Costs], TreePolicy | None]:
    """A fresh policy of an arm, for costs; None decodes plainly.

    Raises:
        BadInput: the arm cannot be replayed.

    """
    if arm.family == "plain":
        return lambda costs: None
    config = _configuration(arm)
    if not config.lossless:
        raise BadInput(_OPTION, arm.name, "arms without the margin rule: a promotion goes on with an unrecorded text")
    if config.max_width > CHILDREN or config.max_depth > DEPTHS[-1]:
        raise BadInput(
            _OPTION, arm.name, f"trees of a depth up to {DEPTHS[-1]} and a width up to {CHILDREN}, as were recorded"
        )
    return lambda costs: make_policy(config, costs)


def _configuration(arm: Arm) -> AdaptiveSpecConfig:
    assert arm.speculative is not None
    if arm.speculative.get("method") == METHOD:
        return load(arm.speculative, foreign=arm.speculative.keys()).config
    if arm.speculative.get("method") != "eagle3" or arm.chain is None:
        raise BadInput(_OPTION, arm.name, "methods 'adaptivespec', and 'eagle3' with num_speculative_tokens")
    shape = {"depth": arm.chain, "width": 1, "nodes": arm.chain}
    if arm.chain > DEPTHS[-1]:
        raise BadInput(_OPTION, arm.name, f"chains of at most {DEPTHS[-1]} tokens, as were recorded")
    return resolve({"tree": {"policy": "static", "shape": shape}})


def simulate(
    recording: Recording, costs: Costs, batch: int, arms: Sequence[Arm], search: Search | None = None
) -> Simulated:
    """Every arm on every kind, plain decoding first among them."""
    result = Simulated(batch)
    plain = batch / costs.of_requests(batch)(batch)
    for arm in arms:
        tallies: dict[str, Tally] = {kind: Tally() for kind in _kinds(recording)}
        for kind, tally in replay(recording, policy_maker(arm)(costs), costs, batch):
            tallies[kind].add(tally)
            if ALL_KINDS in tallies:
                tallies[ALL_KINDS].add(tally)
        result.arms[arm.name] = {kind: Figures.of(tally, plain) for kind, tally in tallies.items()}
    if search is not None:
        found = search.run(costs, batch)
        for kind in _kinds(recording):
            of = None if kind == ALL_KINDS else kind
            result.best_chain[kind] = _best(found, of, plain, chains=True)
            result.best_tree[kind] = _best(found, of, plain, chains=False)
            result.best_of_each[kind] = found.best_of_each(of) / plain
    return result


def _kinds(recording: Recording) -> list[str]:
    kinds = recording.kinds
    return [*kinds, ALL_KINDS] if len(kinds) > 1 else kinds


def _best(found: Found, kind: str | None, plain: float, *, chains: bool) -> Best:
    shape, speed = found.best(kind, chains=chains)
    return Best(list(shape), speed / plain)


@dataclass(frozen=True)
class Choice:
    """What is drafted where something costs ``factor`` times as much, and how fast that is (times plain decoding)."""

    factor: float
    depth: float
    width: float
    nodes: float
    speed: float
    best_chain: float
    best_tree: float


def choices(
    recording: Recording,
    costs: Costs,
    arm: Arm,
    search: Search,
    scale: Callable[[Costs, float], Costs],
    factors: Iterable[float] = FACTORS,
) -> list[Choice]:
    """The choice of an arm, one request at a time, as something gets dearer."""
    result = []
    for factor in factors:
        scaled = scale(costs, factor)
        one = simulate(recording, scaled, 1, [arm], search)
        kind = _kinds(recording)[-1]
        own = one.arms[arm.name][kind]
        result.append(
            Choice(
                factor,
                own.depth,
                own.width,
                own.nodes,
                own.vs_plain,
                one.best_chain[kind].vs_plain,
                one.best_tree[kind].vs_plain,
            )
        )
    return result


def swept(arms: Sequence[Arm]) -> Arm | None:
    """The arm whose choice is followed: the last one that is aware of costs."""
    aware = [arm for arm in arms if arm.name != PLAIN and _configuration(arm).tree.policy == "cost-aware"]
    return aware[-1] if aware else None
