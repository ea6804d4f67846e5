"""Hand-over types of one decoding step.

A request's draft tree, with the conventions used everywhere in this package::

    row      0      1      2      3      4          tree with N = 4 draft nodes
    token    root   a      b      c      d
    parent   -1     0      0      1      3                 root
    depth    0      1      1      2      3                /    \\
    ancestors (bit j = row j is an ancestor or self)     a      b
             00001  00011  00101  01011  11011           |
                                                         c
                                                         |
                                                         d

* Row 0 is the **root**: the last sampled token, whose KV is not computed yet.
* Rows 1..N are the draft nodes. A parent always comes before its children, and nodes are ordered by
  descending path value, so that every prefix of the list is itself a good tree.
* ``nodes``, wherever it is a setting or a count, never counts the root.
* At most ``MAX_TREE_ROWS`` rows a tree: the ancestors of a row are one 64-bit word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch

MAX_TREE_ROWS = 64
"""Rows of a tree, root included; bounded by the 64-bit ancestor word."""

MAX_TREE_NODES = MAX_TREE_ROWS - 1
"""Draft nodes of a tree (the root never counts)."""


class TreeShape(NamedTuple):
    """Bounds of a draft tree: levels, children kept a level, draft nodes kept in all (root not counted)."""

    depth: int
    width: int
    nodes: int


NO_TREE = TreeShape(0, 0, 0)
"""Nothing is drafted."""


class Worth(NamedTuple):
    """What a draft node is worth given its parent: a function of its draft probability, linear between K knots.

    Attributes:
        knots: ``float64 [K]`` draft probabilities, from 0 to 1.
        tables: ``float64 [L, K]`` its value at the knots, by depth; the last row is for all that are deeper.
        factors: ``float64 [B]`` of each request, on the value.
        most: values are at most so much.

    """

    knots: np.ndarray
    tables: np.ndarray
    factors: np.ndarray
    most: float


class Verdicts(NamedTuple):
    """What one walk says about the draft: the C children of all nodes that it reached, the root among them.

    Children of other nodes say nothing: nobody knows what the target would have chosen there.

    Attributes:
        log_probs: C conditional log-probabilities of the draft, each given its parent.
        depths: C depths, 1 for children of the root.
        taken: C times whether the walk went on to this child (at most one child of a node).

    """

    log_probs: list[float]
    depths: list[int]
    taken: list[bool]


NO_VERDICTS = Verdicts([], [], [])


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The draft tree of one request, on the host.

    Attributes:
        tokens: token ids of the N draft nodes (the root is not in the list).
        parents: parent row of each draft node, in ``0..N-1``; 0 is the root.
        root_position: absolute position of the root in the sequence.
        confidence: the draft's probability of its own first choice at the root, in [0, 1].
        shape: the shape that was asked for; the tree itself may be smaller.
        log_probs: draft log-probability of each node given its parent; empty where it is not known.

    """

    tokens: list[int]
    parents: list[int]
    root_position: int
    confidence: float = 0.0
    shape: TreeShape = NO_TREE
    log_probs: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, nodes: int) -> DraftTree:
        """The tree of the first ``nodes`` draft nodes (valid, because parents come first)."""
        if nodes >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:nodes], parents=self.parents[:nodes], log_probs=self.log_probs[:nodes])

    def pick(self, rows: Sequence[int]) -> DraftTree:
        """The tree of the draft nodes at ``rows`` alone, ascending; the parent of each is the root or one of them."""
        if len(rows) == len(self.tokens):
            return self
        place = {0: 0} | {row: new for new, row in enumerate(rows, start=1)}
        return replace(
            self,
            tokens=[self.tokens[row - 1] for row in rows],
            parents=[place[self.parents[row - 1]] for row in rows],
            log_probs=[self.log_probs[row - 1] for row in rows] if self.log_probs else [],
        )

    @staticmethod
    def chain(tokens: list[int], root_position: int) -> DraftTree:
        """A tree of width 1: every token is the child of the one before it."""
        return DraftTree(tokens, list(range(len(tokens))), root_position)

    def depths(self) -> list[int]:
        """Depth of each draft node, 1 for children of the root."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths[1:]

    def verdicts(self, path: Sequence[int]) -> Verdicts:
        """What a walk along ``path`` (rows of accepted nodes, in order) says about each child it could have taken."""
        if not self.log_probs:
            return NO_VERDICTS
        depth_below = {row: depth for depth, row in enumerate((0, *path), start=1)}
        accepted = set(path)
        children = [
            (log_prob, depth_below[parent], row in accepted)
            for row, (parent, log_prob) in enumerate(zip(self.parents, self.log_probs, strict=True), start=1)
            if parent in depth_below
        ]
        return Verdicts(*(list(column) for column in zip(*children, strict=True)))


class TreeTokens(list[int]):
    """Tokens of a draft tree, best first, that know their places in it; a part of the list does too.

    To a scheduler that takes lists of draft tokens it is one.

    Attributes:
        rows: row of each token in the tree as it was drafted (``DraftTree.parents`` counts in these rows).
        parents: row of each one's parent there, 0 the root.

    """

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], rows: Sequence[int] | None = None) -> None:
        super().__init__(tokens)
        self.parents = list(parents)
        self.rows = list(range(1, len(self) + 1)) if rows is None else list(rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return TreeTokens(super().__getitem__(index), self.parents[index], self.rows[index])

    def paths(self) -> list[list[int]]:
        """Places in the list (from 0) from a child of the root to each leaf; of no tokens, one empty path."""
        place = {row: i for i, row in enumerate(self.rows)}
        inner = set(self.parents)
        leaves = [i for i, row in enumerate(self.rows) if row not in inner]
        paths = []
        for leaf in leaves:
            path = [leaf]
            while (parent := self.parents[path[0]]) != 0:
                path.insert(0, place[parent])
            paths.append(path)
        return paths or [[]]

    def pick(self, places: Sequence[int]) -> TreeTokens:
        """The tokens at ``places`` (from 0, ascending) alone."""
        return TreeTokens(*([column[i] for i in places] for column in (self, self.parents, self.rows)))

    def as_chain(self) -> list[int]:
        """The tokens as a text, -1 from the first on that does not follow the one before it in the tree."""
        chained = 0
        while chained < len(self) and self.parents[chained] == (self.rows[chained - 1] if chained else 0):
            chained += 1
        return [*super().__getitem__(slice(chained)), *[-1] * (len(self) - chained)]


@dataclass(slots=True)
class TreeBatch:
    """The trees of all B requests of a step, flat; T rows in all, roots included.

    Attributes:
        start: ``int32 [B + 1]``, first row of each tree; ``start[B] == T``.
        tokens: ``int32 [T]``, token ids.
        parents: ``int32 [T]``, parent row **within the tree**, -1 at roots.
        depths: ``int32 [T]``, 0 at roots.
        positions: ``int64 [T]``, absolute position = root position + depth.
        ancestors: ``int64 [T]``, bit j set: row j of the same tree is an ancestor or the row itself.

    """

    start: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor


@dataclass(slots=True)
class MarginLimits:
    """What a lossy rule may do in this step, per request; ``None`` in its place means strict for all.

    Attributes:
        max_log_ratio: ``float32 [B]``, ln(1 / kappa); a negative value is strict, inf is any child of the tree.
        max_promotions: ``int32 [B]``, promotions allowed in this step; -1 = no limit.
        max_regret: ``float32 [B]``, nats that promotions of this step may give up in all; inf = no limit.
        protected: ``int32 [B, M]``, token ids never promoted to and never promoted away from
            (EOS, stop tokens), padded with -1.

    """

    max_log_ratio: torch.Tensor
    max_promotions: torch.Tensor
    max_regret: torch.Tensor
    protected: torch.Tensor


@dataclass(slots=True)
class VerifyResult:
    """What the walk decided, per request.

    Attributes:
        paths: ``int32 [B, D]``, tree rows of the accepted draft nodes in order, -1 padded (the root is not listed).
        lengths: ``int32 [B]``, accepted draft nodes m; the step emits m + 1 tokens.
        next_tokens: ``int64 [B]``, the target's own token after the accepted path (bonus or correction).
        promotions: ``int32 [B]``, accepted nodes that were not the target's choice.
        regrets: ``float32 [B]``, sum over promotions of ``z_top1 - z_child`` (nats).

    """

    paths: torch.Tensor
    lengths: torch.Tensor
    next_tokens: torch.Tensor
    promotions: torch.Tensor
    regrets: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepFeedback:
    """What a policy learns about one request after a step."""

    confidence: float
    """Draft probability of its first choice at the root."""
    drafted_depth: int
    drafted_nodes: int
    accepted: int
    """Accepted draft nodes, promotions included."""
    promotions: int = 0
    regret: float = 0.0
    verdicts: Verdicts = NO_VERDICTS


NOTHING_DRAFTED = StepFeedback(confidence=0.0, drafted_depth=0, drafted_nodes=0, accepted=0)
"""Of a request that decoded a token of the target's own."""


@dataclass(slots=True)
class RequestSignal:
    """The rolling state that a policy keeps of one request."""

    acceptance: float
    """RAR: exponential moving average of accepted / drafted depth, in [0, 1]."""
    misses: int = 0
    """Steps in a row that drafted and accepted nothing."""
    regret: float = 0.0
    """Log-probability (nats) given up by promotions since the request began."""
    tripped: bool = field(default=False)
    """The circuit breaker is open: the low-confidence shape until something is accepted."""
