"""What a lossy rule may do in a step, from per-request settings to the tensors of the walk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adaptivespec_vllm.types import MarginLimits


@dataclass(frozen=True, slots=True)
class RequestMargin:
    """What a lossy rule may do for one request in this step.

    Attributes:
        max_log_ratio: nats that one promotion may give up: ln(1 / kappa), inf with a rule of another method.
        max_promotions: promotions allowed in this step, None = no limit.
        max_regret: nats that promotions of this step may give up in all.
        protected: token ids never promoted to, and never promoted away from (EOS and stop tokens).
        lookahead: a promotion must be worth what it gives up (:mod:`adaptivespec_vllm.verify.lookahead`).

    """

    max_log_ratio: float
    max_promotions: int | None = None
    max_regret: float = math.inf
    protected: tuple[int, ...] = ()
    lookahead: bool = False


def looking_ahead(margins: Sequence[RequestMargin | None]) -> torch.Tensor | None:
    """``bool [B]``, which requests look ahead; None where none does."""
    chosen = [margin is not None and margin.lookahead for margin in margins]
    return torch.tensor(chosen) if any(chosen) else None


def margin_limits(margins: Sequence[RequestMargin | None]) -> MarginLimits | None:
    """Tensors for the walk; ``None`` (all strict) when no request may promote."""
    if not any(margins):
        return None
    # At least one -1 in every row: it also keeps padding drafts (token -1) from being promoted.
    width = 1 + max(len(m.protected) for m in margins if m)
    protected = torch.full((len(margins), width), -1, dtype=torch.int32)
    for row, margin in zip(protected, margins, strict=True):
        if margin and margin.protected:
            row[: len(margin.protected)] = torch.tensor(margin.protected, dtype=torch.int32)
    return MarginLimits(
        max_log_ratio=torch.tensor([m.max_log_ratio if m else -1.0 for m in margins]),
        max_promotions=torch.tensor(
            [-1 if m is None or m.max_promotions is None else m.max_promotions for m in margins], dtype=torch.int32
        ),
        max_regret=torch.tensor([m.max_regret if m else 0.0 for m in margins]),
        protected=protected,
    )
