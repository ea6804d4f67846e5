"""Attention over two sets of keys, joined by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Callable

import torch

Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes: out ``[R, H, D]``, from the two parts' (outputs ``[R, H, D]``, log-sum-exps ``float32 [H, R]``)."""


def merge_by_lse(
    out: torch.Tensor,
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
) -> None:
    """Join two parts in plain torch.

    A part that saw no key of a row has a log-sum-exp of -inf there (+inf with some kernels); its output is not looked
    at, and may be anything.
    """
    lses = torch.stack([first_lse, second_lse]).float()
    empty = lses.isinf()
    lses = lses.masked_fill(empty, -torch.inf)
    highest = lses.amax(0)
    weights = (lses - highest.masked_fill(highest.isinf(), 0.0)).exp()
    weights = weights / weights.sum(0).clamp(min=torch.finfo(torch.float32).tiny)
    parts = torch.stack([first, second]).float().masked_fill(empty.transpose(1, 2)[..., None], 0.0)
    out.copy_((parts * weights.transpose(1, 2)[..., None]).sum(0))
