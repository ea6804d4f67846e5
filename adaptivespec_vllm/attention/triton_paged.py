"""Tree attention by one paged Triton kernel: prefix and tree in one go, for every GPU that Triton knows."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from adaptivespec_vllm.attention.contract import AttentionUnavailable, PagedKV, TreePlaces

KEYS_A_SPLIT = 512
"""Prefix tokens that are worth a program of their own."""

MOST_SPLITS = 16

PROGRAMS_A_MULTIPROCESSOR = 2
"""Programs beyond which splitting the prefix gains nothing: the device is full."""

_KEYS_A_TILE = 64
_WIDEST_TILE = 64 * 128
"""Elements of a tile of keys, at most: what shared memory holds in two stages."""

_LARGE_TILE = 64 * 128
"""Elements of a tile of queries whose sums four warps cannot keep in registers."""


@cache
def kernels() -> Any:
    """The kernels' module.

    Raises:
        AttentionUnavailable: Triton cannot be imported.

    """
    try:
        from adaptivespec_vllm.attention import triton_kernels
    except ImportError as error:
        raise AttentionUnavailable(f"attention 'triton': Triton cannot be imported ({error})") from error
    return triton_kernels


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def splits_for(prefixes: list[int] | tuple[int, ...], programs: int, multiprocessors: int) -> int:
    """Parts that each prefix is read in, so that few programs with long prefixes fill a device.

    Args:
        prefixes: tokens of each request.
        programs: (query tile, KV head) pairs.
        multiprocessors: of the device.

    """
    free = PROGRAMS_A_MULTIPROCESSOR * multiprocessors // max(programs, 1)
    return max(1, min(free, max(prefixes, default=0) // KEYS_A_SPLIT, MOST_SPLITS))


class TritonTreeAttention:
    """See :class:`~adaptivespec_vllm.attention.contract.TreeAttention`; also for fp8 caches with one scale a tensor.

    Args:
        splits: parts that each prefix is read in; None chooses by prefix and device.

    """

    def __init__(self, splits: int | None = None) -> None:
        self._kernels = kernels()
        self._splits = splits

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
        lse = torch.empty(query.shape[1], query.shape[0], dtype=torch.float32, device=query.device)
        self.with_lse(query, key, value, cache, places, scale, out, lse)

    def with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKV,
        places: TreePlaces,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """The same with log-sum-exps, ``float32 [heads, R]``: -inf where a row sees no key."""
        rows, heads, dim = query.shape
        kv_heads, block_size = cache.key.shape[1:3]
        _check(query, key, value, cache, out)
        if not rows:
            return
        group = heads // kv_heads
        dim_padded = max(16, 1 << (dim - 1).bit_length())
        block_n = min(_KEYS_A_TILE, max(16, _WIDEST_TILE // dim_padded))
        pairs = max(places.queries) * group
        block_m = min(64 if dim_padded <= 128 else 32, max(16, 1 << (pairs - 1).bit_length()))
        tiles = -(-pairs // block_m)
        grid = (len(places.queries) * tiles, kv_heads)
        splits = self._splits or splits_for(tuple(places.prefixes), grid[0] * grid[1], _multiprocessors(query.device))

        parts, parts_lse, out_split = out, lse, 0
        if splits > 1:
            parts = torch.empty(splits, rows, heads, dim, dtype=torch.float32, device=query.device)
            parts_lse = torch.empty(splits, heads, rows, dtype=torch.float32, device=query.device)
            out_split = parts.stride(0)
        one = lse if cache.key_scale is None else cache.key_scale  # not read where there is no scale
        self._kernels.tree_attention_kernel[(*grid, splits)](
            parts,
            parts_lse,
            query,
            key,
            value,
            cache.key,
            cache.value,
            one,
            one if cache.value_scale is None else cache.value_scale,
            places.block_table,
            places.prefix_lens,
            places.query_start,
            places.key_start,
            places.ancestors,
            scale * math.log2(math.e),
            tiles,
            rows,
            out_split,
            *parts.stride()[-3:-1],
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            *cache.key.stride(),
            *cache.value.stride(),
            places.block_table.stride(0),
            GROUP=group,
            DIM=dim,
            DIM_PADDED=dim_padded,
            BLOCK_SIZE=block_size,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            SPLITS=splits,
            SCALED=cache.key_scale is not None,
            DOT=self._kernels.dot_type(query.dtype),
            num_warps=8 if block_m * dim_padded >= _LARGE_TILE else 4,
        )
        if splits > 1:
            self._kernels.join_splits_kernel[(rows, heads)](
                out,
                lse,
                parts,
                parts_lse,
                rows,
                heads,
                *out.stride()[:2],
                DIM=dim,
                DIM_PADDED=dim_padded,
                SPLITS=splits,
                SPLITS_PADDED=1 << (splits - 1).bit_length(),
            )


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: PagedKV, out: torch.Tensor) -> None:
    """What the kernel takes for granted."""
    for name, tensor in {"query": query, "key": key, "value": value, "out": out}.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"tree attention: {name} must be contiguous in its last dimension, got {tensor.stride()}")
        if tensor.dtype != query.dtype:
            raise ValueError(f"tree attention: {name} is {tensor.dtype}, query is {query.dtype}; allowed: one dtype")
    heads, kv_heads = query.shape[1], cache.key.shape[1]
    if heads % kv_heads:
        raise ValueError(f"tree attention: {heads} query heads do not divide by {kv_heads} KV heads")
    if (cache.key_scale is None) != (cache.value_scale is None):
        raise ValueError("tree attention: keys and values of a cache have scales, or neither has")
    if cache.key.dtype != query.dtype and cache.key_scale is None:
        raise ValueError(f"tree attention: a cache of {cache.key.dtype} needs its scales (query is {query.dtype})")
