"""Tree attention by the platform's FlashAttention over the paged prefix, and an op of ours over the tree.

The prefix is seen by every row alike, so the fastest kernel there is can read it, non-causally; the tree is at most 64
keys a request. The two parts are joined by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.attention.contract import PagedKV, TreePlaces
from adaptivespec_vllm.attention.merge import Merge, merge_by_lse

PrefixAttention = Callable[
    [torch.Tensor, PagedKV, TreePlaces, float],
    tuple[torch.Tensor, torch.Tensor],
]
"""(query, cache, places, scale) -> output ``[R, H, D]`` over the paged prefix alone, log-sum-exp ``float32 [H, R]``."""


@dataclass(frozen=True, slots=True)
class FlashTreeAttention:
    """See :class:`~adaptivespec_vllm.attention.contract.TreeAttention`.

    Attributes:
        prefix: attention over the paged prefix, every row of a request seeing all of it.
        merge: joins the parts.

    """

    prefix: PrefixAttention
    merge: Merge = merge_by_lse

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKV,
        places: TreePlaces,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        tree_lse = torch.empty(query.shape[1], query.shape[0], dtype=torch.float32, device=query.device)
        alone = not any(places.prefixes)
        tree_out = out if alone else torch.empty_like(out)
        ops.tree_part_attention(
            query, key, value, places.query_start, places.key_start, places.ancestors, scale, tree_out, tree_lse
        )
        if not alone:
            prefix_out, prefix_lse = self.prefix(query, cache, places, scale)
            self.merge(out, prefix_out, prefix_lse, tree_out, tree_lse)
