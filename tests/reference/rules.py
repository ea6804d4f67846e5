"""Verification by other methods' rules, written down again without a thought for speed: lists of numbers, one node at a
time, every look-ahead walked anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Row = Sequence[float]
Acceptable = Callable[[Row, int], bool]
"""(logits of a place, a token proposed there) -> whether it may stand in for the target's choice there."""


def softmax(z: Row) -> list[float]:
    most = max(z)
    weights = [math.exp(value - most) for value in z]
    return [weight / sum(weights) for weight in weights]


def entropy(p: Sequence[float]) -> float:
    return -sum(value * math.log(value) for value in p if value > 0)


def mars(theta: float) -> Acceptable:
    def acceptable(z: Row, x: int) -> bool:
        ranked = sorted(z, reverse=True)
        return z[x] >= ranked[1] and ranked[0] > 0 and z[x] / ranked[0] > theta

    return acceptable


def typical(epsilon: float, delta: float) -> Acceptable:
    def acceptable(z: Row, x: int) -> bool:
        p = softmax(z)
        return p[x] > min(epsilon, delta * math.exp(-entropy(p)))

    return acceptable


def fly(theta: float) -> Acceptable:
    def acceptable(z: Row, x: int) -> bool:
        return entropy(sorted(softmax(z))[-3:]) >= theta

    return acceptable


@dataclass
class Walk:
    """What a walk over one tree came to."""

    path: list[int]
    next_token: int
    promotions: int = 0
    regret: float = 0.0


def walk(
    acceptable: Acceptable,
    window: int,
    parents: Sequence[int],
    tokens: Sequence[int],
    logits: Sequence[Row],
    protected: frozenset[int] = frozenset(),
    most: int | None = None,
    budget: float = math.inf,
) -> Walk:
    """Walk a tree; lists by row, of which row 0 is the root. Behind a promotion come ``window`` exact nodes, or none of
    it happened."""
    done = Walk([], 0)
    at = 0
    while True:
        z = logits[at]
        choice = z.index(max(z))
        children = [row for row, parent in enumerate(parents) if parent == at and row]
        exact = [row for row in children if tokens[row] == choice]
        if exact:
            at = exact[0]
            done.path.append(at)
            continue
        promoted = None
        if choice not in protected and (most is None or done.promotions < most):
            fit = [row for row in children if tokens[row] not in protected and acceptable(z, tokens[row])]
            if fit:
                promoted = max(fit, key=lambda row: (z[tokens[row]], -row))
                loss = max(z) - z[tokens[promoted]]
                if math.isinf(loss) or done.regret + loss > budget:
                    promoted = None
        behind = [] if promoted is None else _exact_run(promoted, parents, tokens, logits)
        if promoted is None or len(behind) < window:
            done.next_token = choice
            return done
        done.path.append(promoted)
        done.promotions += 1
        done.regret += max(z) - z[tokens[promoted]]
        at = promoted


def _exact_run(row: int, parents: Sequence[int], tokens: Sequence[int], logits: Sequence[Row]) -> list[int]:
    """The nodes that strict verification would accept from a row on."""
    run: list[int] = []
    while True:
        z = logits[row]
        choice = z.index(max(z))
        row = next((r for r, parent in enumerate(parents) if r and parent == row and tokens[r] == choice), 0)
        if not row:
            return run
        run.append(row)
