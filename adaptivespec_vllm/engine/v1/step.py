"""One step of the V1 runner: the trees that the scheduler sent back, matched to what was drafted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from adaptivespec_vllm.kv import CommitPlan, plan_commit
from adaptivespec_vllm.tree import batch_trees
from adaptivespec_vllm.types import DraftTree, TreeBatch, TreeTokens, VerifyResult


@dataclass
class Step:
    """What a step holds, per request in batch order.

    Attributes:
        trees: tree of each request; without nodes where the request decodes plainly or is prefilled.
        drafted: the tree is one that this worker drafted (False: a list that came back changed, taken as a chain).
        deferred: the request's rows are tree rows, and only accepted ones reach the cache. False for prefills and for
            the rare chain behind recomputed tokens, whose rows go through vLLM's own causal attention.
        root_rows: batch row of each root (for a prefill: its last row).
        num_rows: rows of the whole batch.
        batch: the same trees, flat; row i belongs to row i of the logits.
        slots: by KV cache group, the sequential slots of all batch rows, before draft rows were masked.
        result: what the walk decided, once it is known.
        lost: why lists were taken as chains.

    """

    trees: list[DraftTree]
    drafted: list[bool]
    deferred: list[bool]
    root_rows: np.ndarray
    num_rows: int
    batch: TreeBatch
    slots: list[torch.Tensor] = field(default_factory=list)
    result: VerifyResult | None = None
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def has_trees(self) -> bool:
        """Whether any request has draft nodes whose rows are tree rows."""
        return any(deferred and len(tree) for tree, deferred in zip(self.trees, self.deferred, strict=True))

    @cached_property
    def plan(self) -> CommitPlan:
        """Where the accepted rows are and where they belong; once the result is known."""
        assert self.result is not None
        return plan_commit(self.result, self.root_rows)

    def draft_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Batch rows of the draft nodes whose keys and values are deferred, and their rows of ``batch``."""
        start = self.batch.start.tolist()
        rows, nodes = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for first, root, tree, deferred in zip(start, self.root_rows.tolist(), self.trees, self.deferred, strict=False):
            if deferred:
                rows.append(np.arange(root + 1, root + 1 + len(tree)))
                nodes.append(np.arange(first + 1, first + 1 + len(tree)))
        return np.concatenate(rows), np.concatenate(nodes)

    def fresh_rows(self) -> np.ndarray:
        """``int64 [num_rows]``: place of each batch row among the tree rows, -1 for all others."""
        sizes = np.diff(self.batch.start.numpy())[self.deferred]
        roots = self.root_rows[self.deferred]
        place = np.full(self.num_rows, -1, dtype=np.int64)
        rows = np.repeat(roots, sizes) + np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        place[rows] = np.arange(len(rows))
        return place

    def walk_of_tree_rows(self) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """What the walk accepted, as if the batch were its tree rows alone; on the host, once the result is known.

        Returns:
            ``(paths, lengths, roots)`` of the requests that have tree rows, each root as its place among these rows;
            and ``int64``, the batch rows that they are.

        """
        assert self.result is not None
        places, deferred = self.fresh_rows(), np.array(self.deferred)
        which = torch.from_numpy(np.flatnonzero(deferred))
        roots = torch.from_numpy(places[self.root_rows[deferred]].astype(np.int32))
        return (self.result.paths[which], self.result.lengths[which], roots), torch.from_numpy(
            np.flatnonzero(places >= 0)
        )

    @property
    def max_depth(self) -> int:
        """Depth of the deepest tree."""
        return int(self.batch.depths.max())


def match_trees(
    pending: dict[str, DraftTree],
    req_ids: Sequence[str],
    scheduled_drafts: Mapping[str, list[int]],
    computed: np.ndarray,
    scheduled: np.ndarray,
    root_tokens: np.ndarray,
) -> Step:
    """Match the lists of draft tokens that the scheduler sent with the trees they were.

    A list is the tree it was drafted as only if the root is where it was and the list is a prefix of the tree's
    tokens (the scheduler may cut it), or says itself which part of the tree it is (a grammar forbade the rest). Any
    other list (padding, a list of an earlier life of the request) is taken as a chain, which is right for any tokens.

    Args:
        pending: drafted trees by request; those of scheduled requests are taken out.
        req_ids: requests in batch order.
        scheduled_drafts: draft tokens by request.
        computed: ``[B]`` tokens computed before this step.
        scheduled: ``[B]`` rows of each request in this step.
        root_tokens: ``[rows]`` token ids of all batch rows.

    """
    trees, drafted, deferred, lost = [], [], [], Counter[str]()
    ends = np.cumsum(scheduled)
    root_rows = np.empty(len(req_ids), dtype=np.int64)
    for b, req_id in enumerate(req_ids):
        tokens = scheduled_drafts.get(req_id, [])
        rows = int(scheduled[b])
        root_rows[b] = ends[b] - 1 - len(tokens)
        position = int(computed[b]) + rows - 1 - len(tokens)
        tree = pending.pop(req_id, None)
        sequential = rows == len(tokens) + 1
        at_root = tree is not None and sequential and tree.root_position == position
        part = _part(tree, tokens) if tree is not None and at_root else None
        if part is not None:
            trees.append(part)
            drafted.append(True)
        else:
            # Grammar masks follow the tree that the scheduler knows: a text is accepted only as far as that agrees.
            chain = tokens.as_chain() if isinstance(tokens, TreeTokens) else list(tokens)
            trees.append(DraftTree.chain(chain, position))
            drafted.append(False)
            if tokens:
                moved = tree is not None and tree.root_position != position
                lost["no_tree" if tree is None else "moved_root" if moved else "other_tokens"] += 1
        deferred.append(sequential)
    return Step(
        trees=trees,
        drafted=drafted,
        deferred=deferred,
        root_rows=root_rows,
        num_rows=int(ends[-1]),
        batch=batch_trees(trees, root_tokens[root_rows].tolist()),
        lost=lost,
    )


def _part(tree: DraftTree, tokens: list[int]) -> DraftTree | None:
    """The part of a tree that a list of tokens is, if it is one."""
    if not isinstance(tokens, TreeTokens):
        part = tree.cut(len(tokens))
    elif tokens.rows[-1:] <= [len(tree)] and [tree.parents[row - 1] for row in tokens.rows] == tokens.parents:
        part = tree.pick(tokens.rows)
    else:
        return None
    return part if part.tokens == tokens else None
