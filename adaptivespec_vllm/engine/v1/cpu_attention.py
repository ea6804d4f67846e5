"""vLLM's CPU attention with tree rows."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm import _custom_ops as vllm_ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from adaptivespec_vllm.attention import LayoutError, PagedKV, PagedLayout, probe_layout
from adaptivespec_vllm.engine.v1.tree_attention import TreeAttentionImpl

FALLBACK_ISA = "vec"
"""The kernel family whose layout is a matter of strides on every x86-64 machine."""


class TreeCPUAttentionImpl(TreeAttentionImpl, CPUAttentionBackendImpl):
    """vLLM's CPU attention that also knows tree rows."""

    cache_views: tuple[torch.Tensor, torch.Tensor]

    def bind(self, layer: Any, kv_cache: torch.Tensor) -> None:
        """Learn the layout of the layer's cache.

        Raises:
            LayoutError: the layout is not understood.

        """
        _, heads, block_size, both = kv_cache.shape
        layout = _layout_of(layer.isa, block_size, heads, both // 2, kv_cache.dtype, self.kv_cache_dtype)
        self.cache_views = layout.views(kv_cache)

    def paged_kv(self, layer: Any, kv_cache: torch.Tensor) -> PagedKV:
        """Views of the cache that was bound."""
        return PagedKV(*self.cache_views)


@functools.cache
def _layout_of(isa: str, block_size: int, heads: int, dim: int, dtype: torch.dtype, kv_cache_dtype: str) -> PagedLayout:
    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        halves = cache.view(cache.shape[0], heads, 2 * block_size, dim)
        key_cache, value_cache = halves.chunk(2, dim=2)
        vllm_ops.cpu_attn_reshape_and_cache(
            key, value, key_cache, value_cache, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=kv_cache_dtype
        )

    try:
        return probe_layout(write, block_size, heads, dim, dtype)
    except LayoutError as error:
        raise LayoutError(
            f"the KV cache layout of vLLM's CPU attention kernel '{isa}' (block size {block_size}, head size {dim}, "
            f"{dtype}) is not understood: {error}"
        ) from error
