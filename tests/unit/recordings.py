"""Recordings made by hand: full trees of a few levels, with a continuation that is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adaptivespec_vllm.simulate.recording import CHILDREN, Recording, write

USUAL = np.log([0.5, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005]).astype(np.float32)
"""Draft log-probabilities of the children of every node, unless told otherwise."""


def position(
    truth: Sequence[int], levels: int = 3, width: int = CHILDREN, random: np.random.Generator | None = None
) -> tuple[Any, ...]:
    """A recorded position.

    Args:
        truth: ranks of the children that the text goes on with, from the root; those beyond them are unknown.
        levels: how many levels of nodes are recorded, the root's among them.
        width: children of each that are recorded as nodes.
        random: draws the log-probabilities.

    """
    paths: list[tuple[int, ...]] = [()]
    for path in paths:
        if len(path) + 1 < levels:
            paths += [(*path, rank) for rank in range(width)]
    index = {path: i for i, path in enumerate(paths)}
    log_probs = [USUAL if random is None else _drawn(random) for _ in paths]
    parents = [0, *(index[path[:-1]] for path in paths[1:])]
    ranks = [0, *(path[-1] for path in paths[1:])]
    on_truth = [tuple(truth[: len(path)]) == path and len(path) < len(truth) for path in paths]
    taken = [truth[len(path)] if on else -1 for path, on in zip(paths, on_truth, strict=True)]
    return np.stack(log_probs), np.array(parents), np.array(ranks), np.array(taken)


def _drawn(random: np.random.Generator) -> np.ndarray:
    probabilities = np.sort(random.dirichlet(np.full(CHILDREN + 1, random.choice([0.1, 1.0]))))[::-1][:CHILDREN]
    return np.log(probabilities + 1e-6).astype(np.float16).astype(np.float32)


def recording(path: Path, texts: dict[str, Sequence[tuple[Any, ...]]]) -> Recording:
    """Texts by name, written and read again; a name is "kind/number"."""
    listed = [{"id": name, "kind": name.split("/")[0], "positions": list(own)} for name, own in texts.items()]
    write(path, listed, {"target": "by hand", "head": "by hand"})
    return Recording.read(path)


def random_recording(path: Path, seed: int = 0, levels: int = 4) -> Recording:
    """Two kinds, texts of different lengths; the text goes on with likely children more often."""
    random = np.random.default_rng(seed)
    texts = {}
    for name, length in (("a/0", 9), ("b/0", 5), ("a/1", 7), ("a/2", 4)):
        texts[name] = [
            position(random.geometric(0.6, size=random.integers(0, 5)).clip(1, CHILDREN) - 1, levels, random=random)
            for _ in range(length)
        ]
    return recording(path, texts)
