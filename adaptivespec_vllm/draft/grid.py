"""Expansion of trees on the device: every request has a grid of fixed size, and what it does not use is masked.

Nothing here waits for the device: sizes come from the largest shape alone, and each request's own bounds are tensors.
The kept nodes are those of :mod:`adaptivespec_vllm.draft.expand` for a policy that only bounds trees: a node outside
the ``nodes`` best of all levels is expanded here too, but a child of it is worth less than what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from adaptivespec_vllm.draft.ahead import Ahead
from adaptivespec_vllm.draft.expand import DraftHead, LevelRows
from adaptivespec_vllm.types import TreeShape, Worth

NO_TOKEN = -1
"""In the place of a node that a tree does not have."""

_LEAST = -80.0
"""Log-probabilities below it are as good as impossible; their worth stays above nothing."""


Values = Callable[[torch.Tensor, int], torch.Tensor]
"""(``float32 [B, W, k]`` draft log-probabilities of children of W nodes a request, their depth) -> what each is worth
given its parent, at most 0; the path value of a node is the sum along its path."""


@dataclass(slots=True)
class GridBounds:
    """Bounds of each request's tree, within the grid's own.

    Attributes:
        depth: ``int64 [B]``, 0 drafts nothing.
        width: ``int64 [B]``.
        nodes: ``int64 [B]``.
        least_value: path values below it are not kept (natural logarithm).

    """

    depth: torch.Tensor
    width: torch.Tensor
    nodes: torch.Tensor
    least_value: float = -float("inf")


@dataclass(slots=True)
class TreeGrid:
    """Trees of B requests with room for N nodes each, best first; column 0 is the root where there are N + 1 columns.

    Attributes:
        tokens: ``int64 [B, N]``, ``NO_TOKEN`` behind the last node of a tree.
        parents: ``int32 [B, N + 1]``, parent row, -1 at the root; 0 behind the last node.
        depths: ``int32 [B, N + 1]``.
        ancestors: ``int64 [B, N + 1]``, bit j set: row j is an ancestor or the row itself.
        log_probs: ``float32 [B, N]``, draft log-probability of each node given its parent.
        ahead: all that was drafted, whatever of it the trees hold; None where nothing was.

    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    log_probs: torch.Tensor
    ahead: Ahead | None = None


@dataclass(slots=True)
class _Level:
    """Candidates of one level, ``[B, n]`` each; ``parents`` counts candidates of all levels, -1 is the root."""

    values: torch.Tensor
    log_probs: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor


@dataclass(slots=True)
class _Frontier:
    """The W best candidates of a level, which the head runs over.

    Attributes:
        values: ``[B, W]`` path values.
        tokens: ``int64 [B, W]``.
        places: ``int64 [B, W]``, which candidate of its level each one is.
        masks: ``int64 [B, W]``, scratch rows that each one sees.

    """

    values: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    masks: torch.Tensor


def expand_grid(
    head: DraftHead,
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    bounds: GridBounds,
    root_positions: torch.Tensor,
    largest: TreeShape,
    values_of: Values | None = None,
) -> TreeGrid:
    """Draft one tree a request.

    Args:
        head: the draft head, its first pass done.
        log_probs: ``float32 [B, W]`` draft log-probabilities of the best children of each root, descending.
        tokens: ``int64 [B, W]`` their token ids.
        bounds: of each request.
        root_positions: ``int64 [B]`` absolute position of each root.
        largest: of the grid: levels that are run, width W, nodes N.
        values_of: what nodes are worth; None is the log-probabilities themselves.

    """
    if values_of is None:
        values_of = _log_probs
    width = log_probs.shape[1]
    allowed = torch.arange(width, device=log_probs.device) < bounds.width[:, None]
    worth = values_of(log_probs[:, None], 1)[:, 0]
    values = _where_deep_enough(torch.where(allowed, worth, -torch.inf), bounds, 1)
    levels = [_Level(values, log_probs, tokens, torch.full_like(tokens, -1))]
    first = 0
    before: _Frontier | None = None
    expanded: list[tuple[torch.Tensor, ...]] = []
    for depth in range(2, largest.depth + 1):
        frontier = _frontier(levels[-1], before, allowed, depth, width)
        children, child_tokens = head.children(_rows(frontier, before, root_positions, depth), width)
        children = children.view(-1, width, width)
        levels.append(
            _children(frontier, children, values_of(children, depth), child_tokens, allowed, bounds, first, depth)
        )
        above = torch.zeros_like(frontier.places) if before is None else frontier.places // width
        expanded.append((frontier.tokens, above, children, child_tokens.view_as(children)))
        first += levels[-2].values.shape[1]
        before = frontier
    trees = _best(levels, bounds, largest.nodes)
    trees.ahead = Ahead.of(log_probs, tokens, expanded)
    return trees


def _log_probs(log_probs: torch.Tensor, depth: int) -> torch.Tensor:
    return log_probs


class WorthOnDevice:
    """The values of a policy's :class:`types.Worth`, computed where the draft is.

    Args:
        worth: of B requests.
        to_device: copies an array there.

    """

    def __init__(self, worth: Worth, to_device: Callable[[np.ndarray], torch.Tensor]) -> None:
        knots, tables = worth.knots.astype(np.float32), worth.tables.astype(np.float32)
        self._knots, self._inner = to_device(knots), to_device(knots[1:-1])
        self._tables = to_device(tables)
        self._slopes = to_device(np.diff(tables) / np.diff(knots))
        self._factors = to_device(worth.factors.astype(np.float32))[:, None, None]
        self._most = worth.most

    def __call__(self, log_probs: torch.Tensor, depth: int) -> torch.Tensor:
        """See :data:`Values`."""
        level = min(depth, len(self._tables)) - 1
        probabilities = log_probs.clamp(min=_LEAST).exp()
        knot = torch.searchsorted(self._inner, probabilities, right=True)
        value = self._tables[level][knot] + (probabilities - self._knots[knot]) * self._slopes[level][knot]
        return (value * self._factors).clamp(max=self._most).log()


def _where_deep_enough(values: torch.Tensor, bounds: GridBounds, depth: int) -> torch.Tensor:
    kept = (values >= bounds.least_value) & (depth <= bounds.depth[:, None])
    return torch.where(kept, values, -torch.inf)


def _frontier(level: _Level, before: _Frontier | None, allowed: torch.Tensor, depth: int, width: int) -> _Frontier:
    values, places = level.values.sort(dim=1, descending=True, stable=True)
    values, places = torch.where(allowed, values[:, :width], -torch.inf), places[:, :width]
    own = 1 << torch.arange((depth - 2) * width, (depth - 1) * width, device=values.device)
    masks = own.expand_as(places) if before is None else before.masks.gather(1, places // width) | own
    return _Frontier(values, level.tokens.gather(1, places), places, masks)


def _rows(frontier: _Frontier, before: _Frontier | None, root_positions: torch.Tensor, depth: int) -> LevelRows:
    requests, width = frontier.tokens.shape
    device = frontier.tokens.device
    of_request = torch.arange(requests, device=device)[:, None]
    parents = of_request.expand_as(frontier.places) if before is None else of_request * width + frontier.places // width
    scratch = torch.arange((depth - 2) * width, (depth - 1) * width, device=device)
    return LevelRows(
        tokens=frontier.tokens.flatten(),
        # contiguous: of one request, or of width 1, a flattened view has stride 0
        parent_rows=parents.flatten().contiguous(),
        positions=(root_positions + depth - 2).repeat_interleave(width, output_size=requests * width),
        start=torch.arange(0, (requests + 1) * width, width, dtype=torch.int32, device=device),
        scratch_rows=scratch.repeat(requests),
        ancestors=frontier.masks.flatten().contiguous(),
    )


def _children(
    frontier: _Frontier,
    log_probs: torch.Tensor,
    worth: torch.Tensor,
    tokens: torch.Tensor,
    allowed: torch.Tensor,
    bounds: GridBounds,
    first: int,
    depth: int,
) -> _Level:
    """Candidates of the level behind a frontier, whose own candidates begin at ``first``."""
    requests, width = frontier.tokens.shape
    values = torch.where(allowed[:, None], frontier.values[..., None] + worth, -torch.inf)
    parents = (first + frontier.places)[..., None].expand_as(values)
    flat = (t.reshape(requests, width * width) for t in (log_probs, tokens, parents))
    return _Level(_where_deep_enough(values.flatten(1), bounds, depth), *flat)


def _best(levels: list[_Level], bounds: GridBounds, nodes: int) -> TreeGrid:
    """The best candidates of all levels; of equals the shallower, so that parents come first."""
    values, log_probs, tokens, parents = (
        torch.cat([getattr(level, name) for level in levels], dim=1)
        for name in ("values", "log_probs", "tokens", "parents")
    )
    requests, candidates = values.shape
    room = max(0, nodes - candidates)
    ranked, order = values.sort(dim=1, descending=True, stable=True)
    ranked, order = ranked[:, :nodes], order[:, :nodes]
    rank = torch.arange(1, order.shape[1] + 1, device=values.device)
    row_of = order.new_zeros(requests, candidates + 1).scatter_(1, order, rank.expand_as(order))
    there = (ranked > -torch.inf) & (rank <= bounds.nodes[:, None])
    kept = torch.where(there, row_of.gather(1, parents.gather(1, order) % (candidates + 1)), 0)
    pad = torch.nn.functional.pad
    return grid_of(
        pad(torch.where(there, tokens.gather(1, order), NO_TOKEN), (0, room), value=NO_TOKEN),
        pad(kept, (0, room)),
        pad(log_probs.gather(1, order), (0, room)),
        levels=len(levels),
    )


def grid_of(tokens: torch.Tensor, parents: torch.Tensor, log_probs: torch.Tensor, levels: int) -> TreeGrid:
    """The grid of trees that are given by their nodes.

    Args:
        tokens: ``int64 [B, N]``.
        parents: ``int64 [B, N]``, parent row of each node, 0 the root.
        log_probs: ``float32 [B, N]``.
        levels: of the deepest tree, at most.

    """
    above = torch.nn.functional.pad(parents, (1, 0))
    reached = torch.arange(above.shape[1], device=above.device).expand_as(above)
    ancestors = 1 << reached
    depths = torch.zeros_like(above)
    for _ in range(levels):
        depths += reached > 0
        reached = above.gather(1, reached)
        ancestors = ancestors | 1 << reached
    above[:, 0] = -1
    return TreeGrid(tokens, above.int(), depths.int(), ancestors, log_probs)
