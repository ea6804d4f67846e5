"""A make-believe model for the tree policy: texts whose draft probabilities and acceptance are known, modelled time.

The head proposes a few children for every node with draft probabilities drawn at random; the target takes a child
with a probability that a :class:`Text` gives, whatever is drafted. Trees grow through the real expansion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from adaptivespec_vllm.draft import LevelRows, expand_trees
from adaptivespec_vllm.policy.base import TreePolicy
from adaptivespec_vllm.policy.costs import Costs, CostTable
from adaptivespec_vllm.types import NOTHING_DRAFTED, DraftTree, StepFeedback

CHILDREN = 4

Acceptance = Callable[[np.ndarray, int], np.ndarray]
"""(draft probabilities, depth) -> probability that the target takes a child with it."""


def scaled(by: float, by_depth: float = 1.0) -> Acceptance:
    """A draft whose probabilities are too high by a factor, and by another one for each level below the first."""
    return lambda p, depth: p * by * by_depth ** (depth - 1)


def linear(fixed: float, row: float, most: int = 512) -> CostTable:
    """A pass that takes ``fixed`` and ``row`` for each of its rows."""
    return CostTable([(1, fixed + row), (most, fixed + row * most)])


def stairs(fixed: float, step: float, tile: int, most: int = 512) -> CostTable:
    """A pass whose time goes up by ``step`` with each started tile of rows."""
    points = []
    for tiles in range(1, most // tile + 1):
        seconds = fixed + step * tiles
        points += [((tiles - 1) * tile + 1, seconds), (tiles * tile, seconds)]
    return CostTable(points)


@dataclass
class Text:
    """What the draft sees in a request: how sharp its distributions are, and how right it is."""

    sharpness: float
    acceptance: Acceptance


@dataclass
class World:
    """Requests that decode for ever, one text each; time as the cost tables say."""

    texts: list[Text]
    costs: Costs
    seed: int = 0
    seconds: float = 0.0
    tokens: int = 0
    nodes: int = 0
    steps: int = 0
    head_passes: int = 0
    drafted: list[int] = field(default_factory=list)
    """Nodes of each request in the last step."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def run(self, policy: TreePolicy, steps: int) -> float:
        """Decode; tokens a second of these steps."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self._step(policy)
        return (self.tokens - tokens) / (self.seconds - seconds)

    def _step(self, policy: TreePolicy) -> None:
        names = [str(b) for b in range(len(self.texts))]
        drafting = policy.begin(names, [True] * len(names))
        head = _Head(self)
        log_probs = head.proposals(range(len(names)))
        shapes = drafting.bounds(np.exp(log_probs[:, 0].numpy()).tolist())
        tokens = torch.arange(CHILDREN).expand(len(names), CHILDREN)
        trees = expand_trees(head, log_probs, tokens, shapes, [0] * len(names), drafting)
        feedbacks = {name: self._walk(tree, text) for name, tree, text in zip(names, trees, self.texts, strict=True)}
        policy.observe(feedbacks)
        self.drafted = [len(tree) for tree in trees]
        self.seconds += self.costs.overhead + self.costs.target(len(names) + sum(self.drafted))
        drafts = sum(shape.nodes > 0 for shape in shapes)
        self.seconds += self.costs.first(drafts) if drafts else 0.0
        self.seconds += sum(self.costs.level(rows) for rows in head.rows)
        self.tokens += sum(feedback.accepted + 1 for feedback in feedbacks.values())
        self.nodes += sum(self.drafted)
        self.steps += 1
        self.head_passes += drafts

    def _walk(self, tree: DraftTree, text: Text) -> StepFeedback:
        """Siblings share one draw, so that which child is taken does not depend on which of them are there."""
        if not len(tree):
            return NOTHING_DRAFTED
        path: list[int] = []
        at, going_on = 0, True
        while going_on:
            draw, going_on = self.random.random(), False
            for row, parent in enumerate(tree.parents, start=1):
                if parent == at:
                    draw -= float(text.acceptance(np.exp(tree.log_probs[row - 1]), len(path) + 1))
                    if draw < 0:
                        path.append(row)
                        at, going_on = row, True
                        break
        depth = max(tree.depths())
        return StepFeedback(tree.confidence, depth, len(tree), len(path), verdicts=tree.verdicts(path))


class _Head:
    def __init__(self, world: World) -> None:
        self._world = world
        self.rows: list[int] = []

    def proposals(self, owners: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of the children of nodes of requests."""
        logits = np.empty((len(owners), CHILDREN + 1), dtype=np.float32)
        for row, owner in zip(logits, owners, strict=True):
            row[:] = self._world.random.normal(size=len(row)) * self._world.texts[owner].sharpness
        logits = -np.sort(-logits, axis=1)
        return torch.from_numpy(logits).log_softmax(-1)[:, :CHILDREN]

    def children(self, rows: LevelRows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        counts = (rows.start[1:] - rows.start[:-1]).tolist()
        owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
        self.rows.append(len(owners))
        return self.proposals(owners)[:, :width], torch.arange(width).expand(len(owners), -1)
