"""Medians, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaptivespec_vllm.bench.result import Spread

RESAMPLES = 2000
INTERVAL = (2.5, 97.5)
_SEED = 0
"""Of the bootstrap: the same values give the same interval."""


def spread(values: Sequence[float]) -> Spread | None:
    """Median, quartiles and a bootstrap interval of the median; ``None`` of nothing."""
    if not values:
        return None
    data = np.asarray(values, dtype=float)
    return _spread(data, _resampled(data, np.random.default_rng(_SEED)))


def spread_of_change(before: Sequence[float], after: Sequence[float]) -> Spread | None:
    """The change of the median between two samples of different things.

    The interval comes from resampling each on its own; the quartiles are those of all pairs.
    """
    if not before or not after:
        return None
    rng = np.random.default_rng(_SEED)
    a, b = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    pairs = np.subtract.outer(b, a).ravel()
    result = _spread(pairs, _resampled(b, rng) - _resampled(a, rng))
    return result.model_copy(update={"median": float(np.median(b) - np.median(a)), "n": min(len(a), len(b))})


def _spread(values: np.ndarray, medians: np.ndarray) -> Spread:
    q1, median, q3 = np.percentile(values, (25, 50, 75))
    low, high = np.percentile(medians, INTERVAL)
    return Spread(
        median=float(median), q1=float(q1), q3=float(q3), low=float(low), high=float(high), n=len(values)
    )  # fmt: skip


def _resampled(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Medians of samples drawn from ``values`` with replacement."""
    return np.median(values[rng.integers(len(values), size=(RESAMPLES, len(values)))], axis=1)
