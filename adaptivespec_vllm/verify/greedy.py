"""Verification at temperature 0 without logits processors: one call of the fused walk for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.rules import Rule
from adaptivespec_vllm.types import TreeBatch, VerifyResult
from adaptivespec_vllm.verify.limits import RequestMargin, looking_ahead, margin_limits
from adaptivespec_vllm.verify.lookahead import worthwhile_part


def verify_greedy(
    logits: torch.Tensor,
    trees: TreeBatch,
    margins: Sequence[RequestMargin | None],
    max_depth: int,
    rule: Rule | None = None,
) -> VerifyResult:
    """Walk every tree with the target's arg-max.

    Args:
        logits: ``[T, vocabulary]``, row i belongs to row i of ``trees``.
        trees: the trees of the step.
        margins: per request, ``None`` = strict.
        max_depth: depth of the deepest tree (columns of ``paths``).
        rule: of another method: which tokens may be promoted, within ``margins``; ``None`` is any.

    """
    if rule is not None and any(margins):
        trees = acceptable_part(logits, trees, rule)
    limits, chosen = margin_limits(margins), looking_ahead(margins)
    if limits is not None and chosen is not None:
        trees = worthwhile_part(logits, trees, limits, chosen, max_depth)
    return ops.walk_trees(logits, trees, limits, max_depth=max_depth)


def acceptable_part(
    logits: torch.Tensor, trees: TreeBatch, rule: Rule, choices: torch.Tensor | None = None
) -> TreeBatch:
    """The trees with token -1, which the walk never takes, wherever a token is neither exact nor acceptable to a rule.

    Tensor operations only, on the device of ``logits`` and ``trees``; nothing waits for it.

    Args:
        logits: ``[T, vocabulary]``, row i belongs to row i of ``trees``.
        trees: the trees of the step.
        rule: says what is acceptable.
        choices: ``int64 [T]``, the target's choice after each row, which makes a child exact; ``None`` is the arg-max.

    """
    places = torch.arange(len(trees.parents), device=trees.parents.device)
    starts = trees.start.long()
    first = starts[torch.bucketize(places, starts, right=True) - 1]
    rows = first + trees.parents.clamp(min=0)
    drafted = (trees.parents >= 0) & (trees.tokens >= 0)
    tokens = trees.tokens.clamp(min=0).long()
    if choices is None:
        choices = logits.argmax(-1)
    exact = drafted & (choices[rows] == tokens)
    acceptable = drafted & rule.acceptable(logits, rows, tokens)
    if rule.window:
        follows = trees.parents == places - first - 1
        acceptable &= _all_behind(exact & follows, rule.window)
    return replace(trees, tokens=torch.where(exact | acceptable, trees.tokens, -1))


def _all_behind(exact: torch.Tensor, window: int) -> torch.Tensor:
    """Whether the ``window`` rows behind each one are there and exact; a root is not, which ends the tree before it."""
    ahead = torch.cat([exact[1:], exact.new_zeros(window)])
    return ahead.unfold(0, window, 1).all(-1)
