"""How sure a difference is: answers to the same questions, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 5000
INTERVAL = (2.5, 97.5)
_SEED = 0
"""Of the bootstrap: the same answers give the same interval."""

ENOUGH = 0.05
"""Accuracy that a comparison has to be able to tell apart, or it is called too small."""


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact p-value of McNemar's test: how likely it is that as many pairs or more differ one way by chance.

    Args:
        lost: questions answered right before and wrong now.
        gained: the other way round.

    """
    pairs = lost + gained
    tail = sum(math.comb(pairs, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2.0 * tail / 2**pairs)


def recovery(before: Sequence[bool], after: Sequence[bool]) -> tuple[float, float, float] | None:
    """Accuracy now over accuracy before, with a bootstrap interval over questions; None where nothing was right."""
    if not any(before):
        return None
    pairs = np.array([before, after], dtype=bool)
    drawn = pairs[:, np.random.default_rng(_SEED).integers(pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))].sum(-1)
    drawn = drawn[:, drawn[0] > 0]
    low, high = np.percentile(drawn[1] / drawn[0], INTERVAL)
    return float(pairs[1].sum() / pairs[0].sum()), float(low), float(high)


def resolution(lost: int, gained: int, questions: int) -> float:
    """The difference of two accuracies that so many questions can just tell from none, at 95 %.

    Half the width of the normal interval of the difference of paired shares; where no pair differs, the share that
    could still differ without any of them showing it (3 / n).
    """
    if lost + gained == 0:
        return 3.0 / questions
    share, difference = (lost + gained) / questions, (gained - lost) / questions
    return 1.96 * math.sqrt(max(share - difference**2, 1.0 / questions**2) / questions)
