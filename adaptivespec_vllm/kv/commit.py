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
