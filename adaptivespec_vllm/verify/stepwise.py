"""Verification with any sampling parameters: the walk as plain decoding, row by row.

At each node the target's distribution is already known, so a step of the walk is one ordinary sampling step for the
request: the sampler is given the logits of the node where each request stands and draws a token; if a child holds it
the request moves there, otherwise the token is emitted and the request is done. Every emitted token is therefore
exactly a draw of plain decoding (penalties, bans and noise see the tokens accepted before it), whatever the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from adaptivespec_vllm.rules import Rule
from adaptivespec_vllm.types import DraftTree, VerifyResult
from adaptivespec_vllm.verify.limits import RequestMargin

SampleStep = Callable[[torch.Tensor, list[bool], list[list[int]]], tuple[list[int], torch.Tensor]]
"""(logits ``[B, V]`` (own copy), which requests still walk, tokens accepted so far) -> (token per request,
logits of the distribution each was drawn from ``[B, V]``)."""


@dataclass(slots=True)
class _Trial:
    """A promotion that stands only once the tokens behind it turn out to be exact; what the walk goes back to if not.

    Attributes:
        path: accepted nodes before it.
        token: the target's choice in its place.
        regret: nats given up before it.
        missing: exact tokens still to come.

    """

    path: int
    token: int
    regret: float
    missing: int


class StepwiseWalk:
    """The walk of one batch.

    Args:
        trees: one tree a request.
        first_rows: row of each root among the logits.
        margins: per request, ``None`` = strict.
        active: requests to walk; the others (partial prefills) draw nothing and emit nothing of meaning.
        rule: of another method: which tokens may be promoted, within ``margins``; ``None`` is any.

    """

    def __init__(
        self,
        trees: Sequence[DraftTree],
        first_rows: Sequence[int],
        margins: Sequence[RequestMargin | None],
        active: Sequence[bool],
        rule: Rule | None = None,
    ) -> None:
        self._trees = trees
        self._first_rows = first_rows
        self._margins = margins
        self._rule = rule
        self._walking = list(active)
        self._trials: list[_Trial | None] = [None] * len(trees)
        self._path: list[list[int]] = [[] for _ in trees]
        self._emitted: list[list[int]] = [[] for _ in trees]
        self._children = [_children(tree) for tree in trees]
        self._next = [0] * len(trees)
        self._promotions = [0] * len(trees)
        self._regrets = [0.0] * len(trees)

    def run(self, logits: torch.Tensor, sample: SampleStep) -> VerifyResult:
        """Walk all trees to their ends.

        Args:
            logits: ``[T, V]`` of all rows; left untouched.
            sample: draws one token a request.

        """
        while any(self._walking):
            rows = [first + (path[-1] if path else 0) for first, path in zip(self._first_rows, self._path, strict=True)]
            drawn, distribution = sample(logits[rows], self._walking, self._emitted)
            for b, walking in enumerate(self._walking):
                if walking:
                    self._advance(b, drawn[b], distribution)
        depth = max((len(path) for path in self._path), default=0)
        paths = torch.full((len(self._path), max(depth, 1)), -1, dtype=torch.int32)
        for row, path in zip(paths, self._path, strict=True):
            row[: len(path)] = torch.tensor(path, dtype=torch.int32)
        return VerifyResult(
            paths=paths,
            lengths=torch.tensor([len(path) for path in self._path], dtype=torch.int32),
            next_tokens=torch.tensor(self._next),
            promotions=torch.tensor(self._promotions, dtype=torch.int32),
            regrets=torch.tensor(self._regrets),
        )

    def _advance(self, b: int, token: int, distribution: torch.Tensor) -> None:
        at = self._path[b][-1] if self._path[b] else 0
        children = self._children[b].get(at, [])
        tokens = self._trees[b].tokens
        exact = next((child for child in children if tokens[child - 1] == token), None)
        if exact is not None:
            self._move(b, exact)
            self._count_down(b)
            return
        if self._trials[b] is not None:
            self._take_back(b)
            return
        promoted = self._promote(b, token, children, distribution) if children else None
        if promoted is not None:
            self._move(b, promoted)
            return
        self._stop(b, token)

    def _stop(self, b: int, token: int) -> None:
        self._next[b] = token
        self._walking[b] = False

    def _count_down(self, b: int) -> None:
        """A trial has one exact token more behind it."""
        trial = self._trials[b]
        if trial is not None:
            trial.missing -= 1
            if not trial.missing:
                self._trials[b] = None

    def _take_back(self, b: int) -> None:
        """A trial failed: the walk ends where it began, with the target's choice."""
        trial = self._trials[b]
        assert trial is not None
        del self._path[b][trial.path :], self._emitted[b][trial.path :]
        self._promotions[b] -= 1
        self._regrets[b] = trial.regret
        self._trials[b] = None
        self._stop(b, trial.token)

    def _move(self, b: int, node: int) -> None:
        self._path[b].append(node)
        self._emitted[b].append(self._trees[b].tokens[node - 1])

    def _promote(self, b: int, token: int, children: list[int], distribution: torch.Tensor) -> int | None:
        margin = self._margins[b]
        if margin is None or token in margin.protected:
            return None
        if margin.max_promotions is not None and self._promotions[b] >= margin.max_promotions:
            return None
        tokens = self._trees[b].tokens
        open_children = [c for c in children if tokens[c - 1] >= 0 and tokens[c - 1] not in margin.protected]
        row = distribution[b]
        proposals = torch.tensor([tokens[c - 1] for c in open_children], dtype=torch.int64)
        if self._rule is not None and open_children:
            acceptable = self._rule.acceptable(row[None], torch.zeros_like(proposals), proposals)
            open_children = [c for c, a in zip(open_children, acceptable.tolist(), strict=True) if a]
            proposals = proposals[acceptable]
        if not open_children:
            return None
        scores = row[proposals]
        best = int(scores.argmax())
        loss = float(row.max() - scores[best])
        if not (loss <= margin.max_log_ratio and math.isfinite(loss)) or self._regrets[b] + loss > margin.max_regret:
            return None
        if self._rule is not None and self._rule.window:
            self._trials[b] = _Trial(len(self._path[b]), token, self._regrets[b], self._rule.window)
        self._promotions[b] += 1
        self._regrets[b] += loss
        return open_children[best]


def _children(tree: DraftTree) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents, start=1):
        children.setdefault(parent, []).append(node)
    return children
