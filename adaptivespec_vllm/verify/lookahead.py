"""Promotions that are worth what they cost: the margin rule with a view of the whole tree.

All nodes of a tree are verified at once, so what follows each of them is known before the walk. Walking on from a node
brings tokens and, where a child is promoted, gives up nats; with a price of nats a token::

    worth(node) = max(0, max over children c of  1 + worth(c) - loss(c) / price)

where the loss of a child is ``z_top1 - z_c``, 0 for the target's choice. A child may be promoted, and the target's
choice passed over for it, where its loss is within the margin and this is worth it. Each step thereby gives up the
least for the tokens that it brings, at that price.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from adaptivespec_vllm.types import MarginLimits, TreeBatch

TOKENS_OF_A_MARGIN = 2.0
"""Tokens that a promotion must bring if it gives up all that the margin allows, ln(1 / kappa)."""


def worthwhile_part(
    logits: torch.Tensor, trees: TreeBatch, limits: MarginLimits, chosen: torch.Tensor, max_depth: int
) -> TreeBatch:
    """The trees with token -1, which the walk never takes, wherever another child, or to stop, is worth more.

    Tensor operations only, on the device of ``logits`` and ``trees``; nothing waits for it. A request whose promotions
    are counted (``max_promotions``, ``max_regret``) is never led past the target's choice: what follows may be refused.

    Args:
        logits: ``[T, vocabulary]``, row i belongs to row i of ``trees``.
        trees: the trees of the step.
        limits: of promotions, B requests.
        chosen: ``bool [B]``, the requests that look ahead; trees of others stay as they are.
        max_depth: depth of the deepest tree.

    """
    rows = torch.arange(len(trees.parents), device=logits.device)
    starts = trees.start.long()
    owner = torch.bucketize(rows, starts, right=True) - 1
    parents = starts[owner] + trees.parents.clamp(min=0)
    drafted = (trees.parents >= 0) & (trees.tokens >= 0) & (trees.tokens < logits.shape[1])
    tokens = torch.where(drafted, trees.tokens, 0).long()
    most = logits.amax(-1).float()[parents]
    loss = torch.where(drafted, most - logits[parents, tokens].float(), torch.inf)

    margin = limits.max_log_ratio[owner]
    spared = limits.protected[owner].long()
    known = (spared >= 0) & (spared < logits.shape[1])
    choice_is_spared = (known & (logits[parents[:, None], spared * known].float() == most[:, None])).any(-1)
    open_to_promotion = (loss <= margin) & ~choice_is_spared & ~(spared == tokens[:, None]).any(-1)
    exact = loss == 0
    score = torch.where(exact, 1.0, 1.0 - TOKENS_OF_A_MARGIN * loss / margin)
    score = score.masked_fill(~exact & ~open_to_promotion, -torch.inf)
    counted = (limits.max_promotions[owner] >= 0) | limits.max_regret[owner].isfinite()
    has_exact = torch.zeros_like(score).scatter_reduce(0, parents, exact.float(), "amax") > 0
    score = score.masked_fill(counted & ~exact & has_exact[parents], -torch.inf)

    worth = torch.zeros_like(score)
    for depth in range(max_depth, 0, -1):
        score = torch.where(trees.depths == depth, score + worth, score)
        reached = torch.where(trees.depths == depth, score, -torch.inf)
        worth = worth.scatter_reduce(0, parents, reached, "amax")
    kept = (score > 0) & (score == worth[parents])
    return replace(trees, tokens=torch.where(kept | ~chosen[owner] | (trees.parents < 0), trees.tokens, -1))
