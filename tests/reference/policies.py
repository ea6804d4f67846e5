"""Trees of other methods' policies, grown from plain dictionaries of paths."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Path = tuple[int, ...]
LogProbs = Callable[[Path], np.ndarray]
"""The draft's distribution after a path of tokens."""


def best(log_probs: np.ndarray, count: int) -> list[int]:
    return np.argsort(-log_probs, kind="stable")[:count].tolist()


def talon(log_probs_of: LogProbs, k: int, n: int, mu: float, depth: int) -> dict[Path, float]:
    """The kept paths with the logarithms of their probabilities."""
    kept: dict[Path, float] = {}
    level: dict[Path, np.float32] = {(): np.float32(0)}
    for d in range(1, depth + 1):
        children = {
            (*path, token): value + log_probs[token]
            for path, value in level.items()
            for log_probs in [log_probs_of(path)]
            for token in best(log_probs, k)
        }
        if not children:
            break
        least = -math.inf if d == 1 else max(children.values()) + np.float32(math.log(mu))
        fit = {path: value for path, value in children.items() if value >= least}
        level = dict(sorted(fit.items(), key=lambda item: -item[1])[: n - len(kept)])
        kept |= level
        if len(kept) == n:
            break
    return kept


def ddd_depth(log_probs_of: LogProbs, width: int, nodes: int, threshold: float, depth: int) -> int:
    """Levels that are drafted."""
    level: dict[Path, np.float32] = {(): np.float32(0)}
    everything: dict[Path, np.float32] = {}
    for d in range(1, depth):
        children = {
            (*path, token): value + log_probs[token]
            for path, value in level.items()
            for log_probs in [log_probs_of(path)]
            for token in best(log_probs, width)
        }
        everything |= children
        ranked = sorted(everything, key=lambda path: -everything[path])[:nodes]
        beam = sorted(children, key=lambda path: -children[path])[:width]
        level = {path: children[path] for path in beam if path in ranked}
        if not level or math.log(sum(math.exp(value) for value in level.values())) <= threshold:
            return d
    return depth
