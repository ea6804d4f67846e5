"""How likely a drafted node is to be accepted, learnt from what the target did with others like it.

``g(p, depth)`` is the probability that the target takes a child whose draft probability given its parent is ``p``, once
the parent is reached. It is kept at a few knots of ``p`` on each of a few levels, linear in between, and estimated
from every verified child of every node that a walk reached::

    g = (taken + strength * prior) / (seen + strength)

where the prior of level 1 is ``p`` itself, shrunk a bit, and that of a deeper level is what the level above it shows.
Old counts fade, so a drift of the text is followed, and what is not tried for long is tried again.
"""

from __future__ import annotations

import numpy as np

KNOTS = np.array([0.0, 0.002, 0.01, 0.03, 0.08, 0.18, 0.35, 0.55, 0.75, 0.9, 0.97, 1.0])
"""Draft probabilities at which ``g`` is kept; about even in log-odds, which is where it bends."""

LEVELS = 4
"""Depths that are told apart: 1, 2, 3, and all that are deeper."""

MOST = 0.999
"""Nothing is certain; also keeps a child strictly below its parent."""

_SHRINK = 0.9
_STRENGTH = 4.0
"""Observations that the prior of a knot counts for."""

_FADE_VERDICTS = 1 - 1 / 1000
"""A request-step; the memory is about as many of them as the denominator says."""

_FADE_LEVELS = 1 - 1 / 200
"""A level of a step."""

_FIRST_CHILDREN = np.array([[0.55, 0.18, 0.08, 0.03]])
"""Draft probabilities of a node's children before any were seen."""

_INNER = KNOTS[1:-1]
_PER_WIDTH = 1 / np.diff(KNOTS)


class Survival:
    """The table of ``g``, and how often each draft probability comes up.

    Attributes:
        table: ``float64 [LEVELS, K]`` g at the knots; non-decreasing along a level.

    """

    def __init__(self) -> None:
        self._seen = np.zeros((LEVELS, len(KNOTS)))
        self._taken = np.zeros((LEVELS, len(KNOTS)))
        self._children = np.zeros((LEVELS, len(KNOTS)))
        self._best = np.zeros((LEVELS, len(KNOTS)))
        self._expanded = np.zeros((LEVELS, 1))
        for depth in range(1, LEVELS + 1):
            self.look(_FIRST_CHILDREN, depth)
        self._estimate()

    def g(self, probabilities: np.ndarray, depth: int) -> np.ndarray:
        """``g`` of children at a depth, by their draft probabilities; above 0, the same shape."""
        return np.interp(probabilities, KNOTS, self.table[level_of(depth)])

    @property
    def children(self) -> np.ndarray:
        """``[LEVELS, K]`` children of an expanded node near each knot, on average."""
        return self._children / self._expanded

    @property
    def best_child(self) -> np.ndarray:
        """``[LEVELS, K]`` how often the best child of an expanded node is near each knot."""
        return self._best / self._expanded

    def look(self, probabilities: np.ndarray, depth: int) -> None:
        """Count which draft probabilities came up: ``[R, k]`` children of R expanded nodes, best first."""
        level = level_of(depth)
        knot, share = _position(probabilities)
        for counts, new in (
            (self._children, _spread(knot.ravel(), share.ravel())),
            (self._best, _spread(knot[:, 0], share[:, 0])),
            (self._expanded, len(probabilities)),
        ):
            counts[level] = counts[level] * _FADE_LEVELS + new

    def learn(
        self, probabilities: np.ndarray, depths: np.ndarray, taken: np.ndarray, owners: np.ndarray, requests: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Learn from the verdicts of a step.

        Args:
            probabilities: ``[C]`` of the draft for the children of all reached nodes.
            depths: ``[C]`` of the children.
            taken: ``[C]`` whether the walk went on to the child.
            owners: ``[C]`` request of each child, in ``0 .. requests - 1``.
            requests: how many requests were verified.

        Returns:
            ``[requests]`` children that were expected to be taken by what was known before, and those that were.

        """
        knot, share = _position(probabilities)
        levels = np.minimum(depths, LEVELS) - 1
        expected = self.table[levels, knot] * (1 - share) + self.table[levels, knot + 1] * share
        fade = _FADE_VERDICTS**requests
        at = levels * len(KNOTS) + knot
        for counts, new in ((self._seen, np.ones_like(share)), (self._taken, taken.astype(np.float64))):
            counts *= fade
            below = np.bincount(at, (1 - share) * new, counts.size)
            below[1:] += np.bincount(at, share * new, counts.size)[:-1]
            counts += below.reshape(counts.shape)
        self._estimate()
        return np.bincount(owners, expected, requests), np.bincount(owners, taken, requests)

    def _estimate(self) -> None:
        prior = _SHRINK * KNOTS
        per_count = 1 / (self._seen + _STRENGTH)
        table = np.empty_like(self._seen)
        for level in range(LEVELS):
            prior = table[level] = (self._taken[level] + _STRENGTH * prior) * per_count[level]
        # Monotone in p: half way between the least curve above the estimates and the greatest below.
        above = np.maximum.accumulate(table, axis=1)
        below = np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1]
        self.table = np.minimum((above + below) / 2, MOST)
        self.table[:, 0] = 0.0


def level_of(depth: int) -> int:
    """Row of the table for children at a depth (from 1)."""
    return min(depth, LEVELS) - 1


def probabilities_of(log_probs: np.ndarray) -> np.ndarray:
    """Probabilities above 0 and at most 1, whatever comes; what is not a number is as good as impossible."""
    return np.exp(np.minimum(np.fmax(log_probs, -80.0), 0.0))


def _position(probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The knot below each probability, and the share of the way to the next one."""
    knot = np.searchsorted(_INNER, probabilities, side="right")
    return knot, (probabilities - KNOTS[knot]) * _PER_WIDTH[knot]


def _spread(knot: np.ndarray, share: np.ndarray) -> np.ndarray:
    """``[K]`` how many there are near each knot; one between two knots counts for both by its distance."""
    counts = np.bincount(knot, 1 - share, len(KNOTS))
    counts[1:] += np.bincount(knot, share, len(KNOTS))[:-1]
    return counts
