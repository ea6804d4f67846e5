"""Verification at temperature 0 without logits processors: one call of the fused walk for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.types import TreeBatch, VerifyResult
from adaptivespec_vllm.verify.limits import RequestMargin, margin_limits


def verify_greedy(
    logits: torch.Tensor, trees: TreeBatch, margins: Sequence[RequestMargin | None], max_depth: int
) -> VerifyResult:
    """Walk every tree with the target's arg-max.

    Args:
        logits: ``[T, vocabulary]``, row i belongs to row i of ``trees``.
        trees: the trees of the step.
        margins: per request, ``None`` = strict.
        max_depth: depth of the deepest tree (columns of ``paths``).

    """
    return ops.walk_trees(logits, trees, margin_limits(margins), max_depth=max_depth)
