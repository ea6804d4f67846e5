"""Verification with any sampling parameters: the walk as plain decoding, row by row.

At each node the target's distribution is already known, so a step of the walk is one ordinary sampling step for the
request: the sampler is given the logits of the node where each request stands and draws a token; if a child holds it
the request moves there, otherwise the token is emitted and the request is done. Every emitted token is therefore
exactly a draw of plain decoding (penalties, bans and noise see the tokens accepted before it), whatever the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adaptivespec_vllm.types import DraftTree, VerifyResult
from adaptivespec_vllm.verify.limits import RequestMargin

SampleStep = Callable[[torch.Tensor, list[bool], list[list[int]]], tuple[list[int], torch.Tensor]]
"""(logits ``[B, V]`` (own copy), which requests still walk, tokens accepted so far) -> (token per request,
logits of the distribution each was drawn from ``[B, V]``)."""


class StepwiseWalk:
    """The walk of one batch.

    Args:
        trees: one tree a request.
        first_rows: row of each root among the logits.
        margins: per request, ``None`` = strict.
        active: requests to walk; the others (partial prefills) draw nothing and emit nothing of meaning.

    """

    def __init__(
        self,
        trees: Sequence[DraftTree],
        first_rows: Sequence[int],
        margins: Sequence[RequestMargin | None],
        active: Sequence[bool],
    ) -> None:
        self._trees = trees
        self._first_rows = first_rows
        self._margins = margins
        self._walking = list(active)
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
        for child in children:
            if tokens[child - 1] == token:
                self._move(b, child)
                return
        promoted = self._promote(b, token, children, distribution) if children else None
        if promoted is not None:
            self._move(b, promoted)
            return
        self._next[b] = token
        self._walking[b] = False

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
        if not open_children:
            return None
        row = distribution[b]
        scores = row[torch.tensor([tokens[c - 1] for c in open_children])]
        best = int(scores.argmax())
        loss = float(row.max() - scores[best])
        if not loss <= margin.max_log_ratio or self._regrets[b] + loss > margin.max_regret:
            return None
        self._promotions[b] += 1
        self._regrets[b] += loss
        return open_children[best]


def _children(tree: DraftTree) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents, start=1):
        children.setdefault(parent, []).append(node)
    return children
