"""What is worth its time: choices over all requests of a step, given what each node is expected to bring.

Throughout, ``rate`` is the price of time in tokens a second: what a second brings elsewhere. A choice maximises
expected tokens - rate * seconds. Ties go to fewer nodes, then to the earlier request, and within one to
the shallower node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaptivespec_vllm.policy.costs import CostTable
from adaptivespec_vllm.policy.survival import LEVELS, MOST


def nodes_to_keep(
    values: Sequence[np.ndarray],
    base_rows: int,
    rate: float,
    target: CostTable,
    least: np.ndarray | None = None,
) -> list[int]:
    """How many nodes of each request to verify.

    Every node's survival adds to the expected tokens, so for any number of nodes the best are the most likely ones,
    and all numbers are tried: exact for any cost table.

    Args:
        values: B times the log-probabilities that nodes are accepted, descending.
        base_rows: rows of the target's pass without any node.
        rate: tokens a second.
        target: seconds of the target's pass by rows.
        least: ``[B]`` number of nodes of each request that are kept whatever they cost; None is none.

    """
    owner, place = _owners(values)
    survival = np.exp(_joined(values))
    if least is None:
        order, nodes = _best_nodes(survival, base_rows, rate, target)
    else:
        order, nodes = _best_nodes(survival, base_rows, rate, target, place < least[owner])
    return np.bincount(owner[order[:nodes]], minlength=len(values)).tolist()


def price_of_a_row(values: Sequence[np.ndarray], base_rows: int, rate: float, target: CostTable, more: int) -> float:
    """Tokens that ``more`` rows added to the best choice so far would have to bring, each.

    A new row either makes the target's pass longer or takes the place of the least likely node that is kept now.
    Arguments as in :func:`nodes_to_keep`.
    """
    survival = np.exp(_joined(values))
    order, nodes = _best_nodes(survival, base_rows, rate, target)
    rows = base_rows + nodes
    longer = rate * (target(rows + more) - target(rows)) / more
    return min(longer, float(survival[order[nodes - 1]])) if nodes else longer


def _best_nodes(
    survival: np.ndarray, base_rows: int, rate: float, target: CostTable, forced: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """Nodes of all requests from the best (forced ones before all others), and how many of them to verify."""
    fewest = 0 if forced is None else int(np.count_nonzero(forced))
    order = np.argsort(-survival, kind="stable") if forced is None else np.lexsort((-survival, ~forced))
    score = np.zeros(len(order) + 1)
    np.cumsum(survival[order], out=score[1:])
    score -= rate * target(base_rows + np.arange(len(score)))
    return order, fewest + int(np.argmax(score[fewest:]))


def nodes_to_expand(gains: np.ndarray, sizes: Sequence[int], rate: float, level: CostTable) -> list[int]:
    """How many frontier nodes of each request the head should run over; all zero ends the trees.

    Args:
        gains: ``[R]`` expected tokens, net of the rows that verify them, that expanding each node brings; grouped by
            request, descending in each.
        sizes: ``[B]`` nodes of each request.
        rate: tokens a second.
        level: seconds of a level by rows; no rows are no level.

    """
    order = np.argsort(-gains, kind="stable")
    score = np.cumsum(gains[order]) - rate * level(np.arange(1, len(gains) + 1))
    nodes = int(np.argmax(score)) + 1 if len(score) and score.max() > 0 else 0
    return np.bincount(np.repeat(np.arange(len(sizes)), sizes)[order[:nodes]], minlength=len(sizes)).tolist()


def gain_of_children(
    reached: np.ndarray, g: np.ndarray, children: np.ndarray, correction: np.ndarray, price: float
) -> np.ndarray:
    """Expected tokens that the children of nodes bring, net of the rows of those that are worth one.

    Args:
        reached: ``[R]`` probability that each node is accepted.
        g: ``[K]`` probability that a child near each knot is taken.
        children: ``[K]`` expected number of children near each knot.
        correction: ``[R]`` factor of each node's request on ``g``.
        price: tokens that a verified row has to bring.

    Returns:
        ``[R]``

    """
    survival = reached[:, None] * np.minimum(correction[:, None] * g, MOST)
    return np.maximum(survival - price, 0.0) @ children


def gain_of_drafting(
    g: np.ndarray,
    children: np.ndarray,
    best_child: np.ndarray,
    correction: np.ndarray,
    price: float,
    level_price: float,
    depth: int,
) -> np.ndarray:
    """Expected tokens that drafting brings to each request, net of verified rows and levels but not the first pass.

    Follows the best child of each node for as many levels as ``g`` tells apart, and stops where a level does not pay.

    Args:
        g: ``[LEVELS, K]`` as in :func:`gain_of_children`, by level.
        children: ``[LEVELS, K]`` likewise.
        best_child: ``[LEVELS, K]`` how often a node's best child is near each knot.
        correction: ``[B]`` of each request.
        price: tokens that a verified row has to bring.
        level_price: tokens that a request's share of a level has to bring.
        depth: levels of the largest tree.

    Returns:
        ``[B]``

    """
    reached = np.ones_like(correction)
    total = gain_of_children(reached, g[0], children[0], correction, price)
    worth = total > 0
    for level in range(1, min(depth, LEVELS)):
        reached = reached * np.minimum(correction * (g[level - 1] @ best_child[level - 1]), MOST)
        gain = gain_of_children(reached, g[level], children[level], correction, price) - level_price
        worth = worth & (gain > 0)
        if not worth.any():
            break
        total = total + np.where(worth, gain, 0.0)
    return total


def gain_of_a_chain(acceptance: float, price: float, level_price: float, depth: int) -> float:
    """Expected tokens of the best chain whose drafts are all taken so often, net of rows and of levels below the first.

    Arguments as in :func:`gain_of_drafting`.
    """
    gains = acceptance ** np.arange(1, depth + 1) - price
    gains[1:] -= level_price
    return float(np.cumsum(gains).max())


def requests_to_draft(gains: np.ndarray, rows: np.ndarray, base_rows: int, rate: float, first: CostTable) -> np.ndarray:
    """Which requests the head's first pass should run over.

    Args:
        gains: ``[B]`` expected tokens of drafting, net of everything but the first pass.
        rows: ``[B]`` rows of each request in it.
        base_rows: rows that it holds in any case.
        rate: tokens a second.
        first: seconds of the pass by rows; no rows are no pass.

    Returns:
        ``bool [B]``

    """
    order = np.argsort(-gains, kind="stable")
    spent = first(base_rows + np.cumsum(rows[order])) - (first(base_rows) if base_rows else 0.0)
    score = np.cumsum(gains[order]) - rate * spent
    chosen = np.zeros(len(gains), dtype=bool)
    if len(score) and score.max() > 0:
        chosen[order[: int(np.argmax(score)) + 1]] = True
    return chosen


def _joined(lists: Sequence[np.ndarray]) -> np.ndarray:
    """The values of all requests, one request after the other."""
    return np.concatenate(lists).astype(np.float64) if len(lists) else np.zeros(0)


def _owners(lists: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Request of each value of all requests, and its place in its request's list."""
    counts = np.array([len(values) for values in lists], dtype=np.int64)
    owner = np.repeat(np.arange(len(lists)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
