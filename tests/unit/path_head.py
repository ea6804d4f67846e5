"""A draft head for tests, whose output follows from the tokens since the root."""

from __future__ import annotations

import numpy as np
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import LevelRows

VOCABULARY = 6


def log_probs_of(seed: int, path: tuple[int, ...]) -> np.ndarray:
    """The draft's distribution after a path of tokens."""
    logits = np.random.default_rng((seed, *path)).normal(size=VOCABULARY) * 2
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


class PathHead:
    """A head whose output follows from the tokens since the root; knows a node only by what it is given."""

    def __init__(self, seeds: list[int]) -> None:
        self._seeds = seeds
        self._paths: list[tuple[int, ...]] = [()] * len(seeds)  # of the rows of the previous call
        self.levels: list[LevelRows] = []

    def children(self, rows: LevelRows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.levels.append(rows)
        owners = torch.repeat_interleave(torch.arange(len(self._seeds)), rows.start[1:] - rows.start[:-1]).tolist()
        before = [self._paths[row] for row in rows.parent_rows.tolist()]
        self._paths = [(*path, token) for path, token in zip(before, rows.tokens.tolist(), strict=True)]
        values = [log_probs_of(self._seeds[b], path) for b, path in zip(owners, self._paths, strict=True)]
        return ops.topk_logprobs(torch.tensor(np.array(values)), width)
