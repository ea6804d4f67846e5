"""vLLM's CUDA attention backends with tree rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

from adaptivespec_vllm.attention import PagedKV, TreeAttention, TreePlaces, choose
from adaptivespec_vllm.attention.flash import PrefixAttention
from adaptivespec_vllm.engine.refusals import Unsupported
from adaptivespec_vllm.engine.v1.tree_attention import TreeAttentionImpl

STOCK = (FlashAttentionImpl, TritonAttentionImpl)
"""Implementations that can learn trees; their caches differ in strides alone."""


class _PackedCache(TreeAttentionImpl):
    """Both backends keep values behind keys in the last dimension of one cache."""

    head_size: int

    def paged_kv(self, layer: Any, kv_cache: torch.Tensor) -> PagedKV:
        """Views; strides are whatever vLLM's layout is."""
        key, value = kv_cache.split(self.head_size, dim=-1)
        return PagedKV(key, value)


class TreeFlashAttentionImpl(_PackedCache, FlashAttentionImpl):
    """vLLM's FlashAttention that also knows tree rows."""


class TreeTritonAttentionImpl(_PackedCache, TritonAttentionImpl):
    """vLLM's Triton attention that also knows tree rows."""


def teach(layers: Mapping[str, Any], all_layers: Mapping[str, Any], name: str) -> tuple[str, TreeAttention]:
    """Put tree rows into attention layers.

    Args:
        layers: those that can learn trees.
        all_layers: every layer of target and head that vLLM knows by name.
        name: value of the key ``attention``.

    Returns:
        What computes tree rows, by its name.

    Raises:
        Unsupported: a layer runs on another backend.
        AttentionUnavailable: ``name`` cannot be used with these layers.

    """
    for layer_name, layer in all_layers.items():
        if layer_name not in layers and hasattr(layer, "impl"):
            raise Unsupported(
                f"not supported with method 'adaptivespec': attention backend of layer {layer_name} "
                f"({type(layer.impl).__name__}): trees are written for FLASH_ATTN and TRITON_ATTN; choose one of them "
                "(--attention-backend, and attention_backend of the speculative configuration for the head)"
            )
    for layer in layers.values():
        adopts = TreeFlashAttentionImpl if isinstance(layer.impl, FlashAttentionImpl) else TreeTritonAttentionImpl
        layer.impl = adopts.adopt(layer.impl)
    return choose(name, "cuda", prefix=flash_prefix(layers), merge=merge_attn_states)


def flash_prefix(layers: Mapping[str, Any]) -> PrefixAttention | None:
    """vLLM's FlashAttention over the paged prefix; None where it does not run for all layers in one version.

    The kernel of version 4 for heads of 256 wants whole pages, which a prefix does not end with.
    """
    impls = [layer.impl for layer in layers.values()]
    if not all(isinstance(impl, FlashAttentionImpl) for impl in impls):
        return None
    versions = {impl.vllm_flash_attn_version for impl in impls}
    if len(versions) != 1 or any(impl.fa4_hd256 for impl in impls):
        return None
    version = versions.pop()

    def attend(
        query: torch.Tensor, cache: PagedKV, places: TreePlaces, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (canonicalize_singleton_dim_strides(t.transpose(1, 2)) for t in (cache.key, cache.value))
        out, lse = flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=places.query_start,
            max_seqlen_q=max(places.queries),
            seqused_k=places.prefix_lens,
            max_seqlen_k=max(places.prefixes),
            softmax_scale=scale,
            causal=False,
            block_table=places.block_table,
            return_softmax_lse=True,
            fa_version=version,
        )
        return out, lse

    return attend
