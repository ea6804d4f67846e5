"""Recorded texts decoded in virtual time by the real policies and the real expansion of trees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from adaptivespec_vllm.draft import LevelRows, expand_trees
from adaptivespec_vllm.policy.base import TreePolicy
from adaptivespec_vllm.policy.costs import Costs
from adaptivespec_vllm.simulate.recording import NOT_TAKEN, Position, RecordedText, Recording
from adaptivespec_vllm.types import NOTHING_DRAFTED, DraftTree, StepFeedback

_UNLIKELY = -20.0
"""Log-probability of children that were not recorded: no text goes on with them."""


@dataclass
class Tally:
    """What decoding a group of texts took and gave."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    """Steps of requests: a step of a batch of B counts as B."""
    nodes: int = 0
    depth: int = 0
    width: int = 0
    first_passes: int = 0
    unrecorded: int = 0
    """Nodes that a policy expanded and the recording does not know."""

    def add(self, other: Tally) -> None:
        """Count another group's too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Group:
    """Texts of one kind that are decoded together, in as many slots as the batch is large.

    Attributes:
        kind: of all texts.
        slots: of each slot the texts that it decodes one after the other, over and over.
        tokens: how many are decoded in all. All slots are busy to the end, so no step is that of a smaller batch.

    """

    kind: str
    slots: list[list[RecordedText]]
    tokens: int


def groups(recording: Recording, batch: int) -> list[Group]:
    """What is decoded together.

    Of a batch of one every text is a group, the kinds taking turns. Of larger ones every kind is: slot i begins with
    its text i (modulo their number) and goes on with the next, until as many tokens are decoded as these first texts,
    or all texts if they are more, have.
    """
    by_kind = {kind: [text for text in recording.texts if text.kind == kind] for kind in recording.kinds}
    if batch == 1:
        most = max(map(len, by_kind.values()))
        return [
            Group(kind, [[own[turn]]], own[turn].tokens)
            for turn in range(most)
            for kind, own in by_kind.items()
            if turn < len(own)
        ]
    return [
        Group(
            kind,
            [own[slot % len(own) :] + own[: slot % len(own)] for slot in range(batch)],
            sum(own[slot % len(own)].tokens for slot in range(max(batch, len(own)))),
        )
        for kind, own in by_kind.items()
    ]


class RecordedHead:
    """The head of a step, as ``draft.expand`` asks it: a token is the rank of a child.

    Args:
        positions: where each request stands; None for one that does not draft.

    """

    def __init__(self, positions: Sequence[Position | None]) -> None:
        self._rows: list[tuple[Position, int] | None] = [None if p is None else (p, 0) for p in positions]
        self.levels: list[int] = []
        """Rows of each level."""
        self.unrecorded = 0

    def first(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Children of the roots: ``float32 [B, width]`` and ``int64 [B, width]``."""
        return self._answer(width)

    def children(self, rows: LevelRows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the nodes of a level (see ``DraftHead``)."""
        before, self._rows = self._rows, []
        for row, rank in zip(rows.parent_rows.tolist(), rows.tokens.tolist(), strict=True):
            parent = before[row]
            node = -1 if parent is None else int(parent[0].nodes[parent[1], rank])
            self.unrecorded += node < 0
            self._rows.append(None if parent is None or node < 0 else (parent[0], node))
        self.levels.append(len(self._rows))
        return self._answer(width)

    def _answer(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = np.full((len(self._rows), width), _UNLIKELY, dtype=np.float32)
        for values, row in zip(log_probs, self._rows, strict=True):
            if row is not None:
                values[:] = row[0].log_probs[row[1], :width]
        return torch.from_numpy(log_probs), torch.arange(width).expand(len(self._rows), width)


def accepted_path(tree: DraftTree, position: Position) -> list[int]:
    """Rows of the nodes that the text goes on with, as strict verification accepts them."""
    row_of = {(parent, rank): row for row, (parent, rank) in enumerate(zip(tree.parents, tree.tokens, strict=True), 1)}
    path: list[int] = []
    row = node = 0
    while node >= 0 and (rank := int(position.taken[node])) != NOT_TAKEN and (row, rank) in row_of:
        row, node = row_of[row, rank], int(position.nodes[node, rank])
        path.append(row)
    return path


def replay(
    recording: Recording, policy: TreePolicy | None, costs: Costs, batch: int = 1
) -> Iterator[tuple[str, Tally]]:
    """Decode all texts with one policy that lives as long as an engine's; of each group its kind and its tally.

    Args:
        recording: the texts.
        policy: decides; None decodes plainly.
        costs: what a step costs.
        batch: texts that are decoded together.

    """
    for number, group in enumerate(groups(recording, batch)):
        yield group.kind, _decode(group, str(number), policy, costs)


def _decode(group: Group, name: str, policy: TreePolicy | None, costs: Costs) -> Tally:
    tally = Tally()
    waiting = [itertools.cycle(texts) for texts in group.slots]
    names = (f"{name}.{number}" for number in itertools.count())
    running = [_Request(next(names), next(texts)) for texts in waiting]
    while tally.tokens < group.tokens:
        if policy is None:
            trees, feedbacks = [DraftTree([], [], 0)] * len(running), [NOTHING_DRAFTED] * len(running)
        else:
            trees, feedbacks = _draft_and_verify(running, policy, costs, tally)
        tally.seconds += costs.of_requests(len(running))(len(running) + sum(map(len, trees)))
        for slot, (tree, feedback) in enumerate(zip(trees, feedbacks, strict=True)):
            request = running[slot]
            depths = tree.depths()
            tally.steps += 1
            tally.nodes += len(tree)
            tally.depth += feedback.drafted_depth
            tally.width += max((depths.count(depth) for depth in set(depths)), default=0)
            tally.tokens += request.go_on(feedback.accepted + 1)
            if request.done:
                if policy is not None:
                    policy.forget(request.name)
                running[slot] = _Request(next(names), next(waiting[slot]))
    return tally


@dataclass
class _Request:
    """A text that is being decoded."""

    name: str
    text: RecordedText
    at: int = 0
    """Index of the root."""
    rows: int = field(default=1)
    """Tokens that have not been through the head's first pass."""

    @property
    def done(self) -> bool:
        return self.at >= self.text.tokens

    @property
    def position(self) -> Position:
        return self.text.positions[self.at]

    def go_on(self, emitted: int) -> int:
        """Emit tokens, as many as the text has left; how many that were."""
        emitted = min(emitted, self.text.tokens - self.at)
        self.at += emitted
        self.rows += emitted
        return emitted


def _draft_and_verify(
    running: list[_Request], policy: TreePolicy, costs: Costs, tally: Tally
) -> tuple[list[DraftTree], list[StepFeedback]]:
    """One step but for its target pass: the head's time goes into the tally.

    Rows of requests that do not draft wait until they do, as in an engine that has room for them.
    """
    drafting = policy.begin([r.name for r in running], [True] * len(running), [r.rows for r in running])
    passing = [r for r, drafts in zip(running, drafting.drafts, strict=True) if drafts]
    if passing:
        tally.seconds += costs.first(sum(r.rows for r in passing))
        tally.first_passes += len(passing)
    for request in passing:
        request.rows = 0

    trees = [DraftTree([], [], 0)] * len(running)
    if any(drafting.drafts):
        roots = [r.position if drafts else None for r, drafts in zip(running, drafting.drafts, strict=True)]
        head = RecordedHead(roots)
        log_probs, ranks = head.first(policy.config.max_width)
        shapes = drafting.bounds(np.exp(log_probs[:, 0].numpy()).tolist())
        trees = expand_trees(head, log_probs, ranks, shapes, [0] * len(running), drafting)
        tally.seconds += sum(costs.level(rows) for rows in head.levels)
        tally.unrecorded += head.unrecorded
    feedbacks = [_feedback(tree, request.position) for tree, request in zip(trees, running, strict=True)]
    policy.observe({request.name: feedback for request, feedback in zip(running, feedbacks, strict=True)})
    return trees, feedbacks


def _feedback(tree: DraftTree, position: Position) -> StepFeedback:
    if not len(tree):
        return NOTHING_DRAFTED
    path = accepted_path(tree, position)
    return StepFeedback(tree.confidence, max(tree.depths()), len(tree), len(path), verdicts=tree.verdicts(path))
