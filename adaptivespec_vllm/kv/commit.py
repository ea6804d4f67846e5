"""Deferred commit of keys and values.

During the target's forward pass the draft rows of a tree have slot -1: nothing of them reaches the cache. After the
walk the rows of the accepted path, and only they, are written to consecutive slots behind the root::

    rows in the batch     root  a  b  c  d        accepted path: b, d
    sequential slots      s0    s1 s2 s3 s4       commit: row b -> s1, row d -> s2

So the cache never holds anything of a token that was not accepted, and prefix caching and preemption need no care.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from adaptivespec_vllm.types import VerifyResult


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """Where the accepted rows of a step are and where they belong.

    Attributes:
        rows: ``int64 [A]``, batch rows of the accepted draft nodes.
        targets: ``int64 [A]``, batch row whose (sequential) slot each of them is written to.

    """

    rows: np.ndarray
    targets: np.ndarray


def plan_commit(result: VerifyResult, root_rows: Sequence[int]) -> CommitPlan:
    """Plan the commit of a step.

    Args:
        result: what the walk accepted.
        root_rows: batch row of each request's root.

    """
    paths, lengths, roots = result.paths.numpy(), result.lengths.numpy(), np.asarray(root_rows, dtype=np.int64)
    accepted = np.arange(paths.shape[1])[None, :] < lengths[:, None]
    rows = (roots[:, None] + paths)[accepted]
    targets = (roots[:, None] + 1 + np.arange(paths.shape[1])[None, :])[accepted]
    return CommitPlan(rows=rows, targets=targets)


def rows_in_sequence(result: VerifyResult, root_rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """For each row of the batch, the row whose token takes its place in the sequence; on the device.

    Args:
        result: what the walk accepted.
        root_rows: ``int64 [B]``, batch row of each request's root.
        num_rows: rows of the whole batch.

    Returns:
        ``int64 [num_rows]``; rows of no accepted place are themselves.

    """
    sources, targets = _places(result, root_rows, num_rows)
    rows = torch.arange(num_rows + 1, device=root_rows.device)
    return rows.scatter_(0, targets, sources)[:num_rows]


def commit_slots(result: VerifyResult, root_rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Slot that each row's keys and values are committed to, -1 of rows that are not accepted; on the device.

    Args:
        result: what the walk accepted.
        root_rows: ``int64 [B]``, batch row of each request's root.
        slots: ``int64 [rows]``, sequential slots of all batch rows.

    """
    num_rows = len(slots)
    sources, targets = _places(result, root_rows, num_rows)
    padded = torch.nn.functional.pad(slots, (0, 1), value=-1)
    return torch.full_like(padded, -1).scatter_(0, sources, padded[targets])[:num_rows]


def _places(result: VerifyResult, root_rows: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each accepted node and the row whose place it takes, flat; ``num_rows`` stands for "none"."""
    at = torch.arange(result.paths.shape[1], device=root_rows.device)
    accepted = at < result.lengths[:, None]
    sources = torch.where(accepted, root_rows[:, None] + result.paths, num_rows)
    targets = torch.where(accepted, root_rows[:, None] + 1 + at, num_rows)
    return sources.flatten(), targets.flatten()
