"""How large trees are to be, before they are drafted: as large as the policy would have made those drafted last.

Sizes are needed on the host when drafting begins, and what is drafted stays on the device. So all of it is copied while
the next step runs, and a policy that steers trees as they grow grows them from the copy, a step late.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream

from adaptivespec_vllm.draft import NO_TOKEN, Ahead, RecordedHead, expand_trees
from adaptivespec_vllm.policy.base import Drafting
from adaptivespec_vllm.types import NO_TREE, DraftTree, TreeShape

_FIRST_LEVEL = 2
"""Arrays of an ``Ahead`` that are of the first level; in the others, levels come first."""


@dataclass(frozen=True)
class _Copy:
    """What was drafted for some requests, on its way to the host; arrays as in ``Ahead``."""

    requests: Sequence[str]
    arrays: list[np.ndarray]
    drafted: Ahead
    """On the device; must not be freed before it is copied."""
    arrival: Any

    def is_there(self) -> bool:
        query = getattr(
            self.arrival, "query", None
        )  # vLLM's stand-in on a CPU, where copies are made at once, has none
        return query is None or bool(query())

    def of(self, place: int) -> list[np.ndarray]:
        """Of one request alone."""
        first, deeper = self.arrays[:_FIRST_LEVEL], self.arrays[_FIRST_LEVEL:]
        return [array[place] for array in first] + [array[:, place] for array in deeper]


class Forecast:
    """What was drafted last for each request, as far as the host knows."""

    def __init__(self) -> None:
        self._coming: deque[_Copy] = deque()
        self._last: dict[str, list[np.ndarray]] = {}
        self._typical: TreeShape | None = None
        """Mean depth and nodes of the last trees that there were."""

    def put(self, requests: Sequence[str], drafted: Ahead, copy_stream: Any, main_stream: Any) -> None:
        """Copy what was drafted for requests (an empty name: nothing of meaning); nothing waits for it."""
        arrival = torch.cuda.Event()
        with stream(copy_stream, main_stream):
            copy_stream.wait_stream(main_stream)
            arrays = [async_copy_to_np(tensor) for tensor in drafted.tensors()]
            arrival.record(copy_stream)
        self._coming.append(_Copy(requests, arrays, drafted, arrival))

    def requests(self) -> Iterable[str]:
        """Those of which something is known."""
        return self._last.keys()

    def forget(self, request: str) -> None:
        """The request has ended."""
        self._last.pop(request, None)

    def sizes(self, drafting: Drafting, requests: Sequence[str], bounds: Sequence[TreeShape]) -> list[TreeShape]:
        """The largest tree of each request in this step.

        Args:
            drafting: of the step.
            requests: of its batch.
            bounds: the largest tree of each that is allowed; ``NO_TREE`` for those that do not draft.

        """
        self._receive(set(requests))
        known = [b for b, request in enumerate(requests) if bounds[b].nodes and request in self._last]
        trees = self._grow(drafting, requests, bounds, known)
        if trees:
            # One level more than was worth it, or nobody would know whether it is now.
            sizes = [(1 + max(tree.depths(), default=0), len(tree)) for tree in trees.values()]
            depth, nodes = (math.ceil(sum(column) / len(sizes)) for column in zip(*sizes, strict=True))
            self._typical = TreeShape(depth, 0, max(1, nodes))
        typical = self._typical or max(bounds, default=NO_TREE)
        return [bound if not bound.nodes else _within(bound, trees.get(b), typical) for b, bound in enumerate(bounds)]

    def _receive(self, alive: set[str]) -> None:
        while self._coming and self._coming[0].is_there():
            copy = self._coming.popleft()
            self._last.update({r: copy.of(place) for place, r in enumerate(copy.requests) if r in alive})

    def _grow(
        self, drafting: Drafting, requests: Sequence[str], bounds: Sequence[TreeShape], known: list[int]
    ) -> dict[int, DraftTree]:
        """The trees that the policy makes of what was drafted last, by place in the batch."""
        if not known:
            return {}
        drafted = _joined([self._last[requests[b]] for b in known])
        at = torch.tensor(known)
        log_probs, tokens = (
            t.new_zeros(len(requests), t.shape[1]).index_copy(0, at, t) for t in (drafted.log_probs, drafted.tokens)
        )
        head = RecordedHead(drafted, known)
        shapes = [NO_TREE] * len(requests)
        for b in known:
            shapes[b] = bounds[b]
        trees = expand_trees(head, log_probs, tokens, shapes, [0] * len(requests), drafting, head.expandable)
        return {b: trees[b] for b in known}


def _within(bound: TreeShape, tree: DraftTree | None, typical: TreeShape) -> TreeShape:
    """As large as the tree of before and one level more; as large as others' where there was none."""
    if tree is None:
        return TreeShape(min(bound.depth, typical.depth), bound.width, min(bound.nodes, typical.nodes))
    return TreeShape(min(bound.depth, 1 + max(tree.depths(), default=0)), bound.width, len(tree))


def _joined(parts: Sequence[list[np.ndarray]]) -> Ahead:
    """What was drafted for single requests, side by side; levels that some do not have hold no token."""
    levels = max(len(part[_FIRST_LEVEL]) for part in parts)

    def padded(array: np.ndarray) -> np.ndarray:
        none = np.full((levels - len(array), *array.shape[1:]), NO_TOKEN, dtype=array.dtype)
        return np.concatenate([array, none])

    first, deeper = range(_FIRST_LEVEL), range(_FIRST_LEVEL, len(parts[0]))
    return Ahead(
        *(torch.from_numpy(np.stack([part[i] for part in parts])) for i in first),
        *(torch.from_numpy(np.stack([padded(part[i]) for part in parts], axis=1)) for i in deeper),
    )
