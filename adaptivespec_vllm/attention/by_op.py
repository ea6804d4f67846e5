"""Tree attention by the op of this package: prefix and tree in one pass, what a CPU runs."""

from __future__ import annotations

import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.attention.contract import PagedKV, TreePlaces


def attend_by_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: PagedKV,
    places: TreePlaces,
    scale: float,
    out: torch.Tensor,
) -> None:
    """See :class:`~adaptivespec_vllm.attention.contract.TreeAttention`; the cache holds the model's dtype."""
    ops.tree_attention(
        query, key, value, cache.key, cache.value, places.block_table, places.prefix_lens, places.query_start,
        places.key_start, places.ancestors, scale, out,
    )  # fmt: skip
