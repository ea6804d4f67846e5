"""The Triton kernels of tree attention. Importing this module needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def dot_type(dtype: torch.dtype) -> Any:
    """What products of tensors of a dtype are computed in. Triton's interpreter knows no product of bfloat16."""
    return tl.float32 if triton.knobs.runtime.interpret else _TYPES[dtype]


@triton.jit
def _seen(
    scores,
    visible,
    values,
    value_scale,
    peak,
    total,
    acc,
    DOT: tl.constexpr,
):
    """The running softmax after one more tile of keys: scores ``[M, N]`` in units of log2, values ``[N, D]``."""
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrunk = tl.exp2(peak - base)
    weights = tl.exp2(scores - base[:, None])
    acc = acc * shrunk[:, None]
    weights_there = weights.to(values.dtype).to(DOT)
    acc += tl.dot(weights_there, values.to(DOT), input_precision="ieee") * value_scale
    return new_peak, total * shrunk + tl.sum(weights, 1), acc


@triton.jit
def tree_attention_kernel(
    out,  # [R, Hq, D], or with SPLITS > 1 float32 [SPLITS, R, Hq, D]
    lse,  # float32 [Hq, R], or with SPLITS > 1 [SPLITS, Hq, R]
    query,
    key,
    value,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    block_table,
    prefix_lens,
    query_start,
    key_start,
    ancestors,
    scale,  # of the scores, times log2(e)
    tiles,  # query tiles of a request, at most
    all_rows,
    out_split,
    out_row,
    out_head,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    key_cache_block,
    key_cache_head,
    key_cache_token,
    key_cache_dim,
    value_cache_block,
    value_cache_head,
    value_cache_token,
    value_cache_dim,
    table_row,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,  # what products are computed in
):
    """One tile of a request's (row, query head of one KV head) pairs, over one part of its prefix.

    The last part also sees the tree. Keys of the prefix are visible to every row; a key of the tree is visible where
    its bit of the row's ancestor word is set.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = tile // tiles
    first_row = tl.load(query_start + request)
    rows = tl.load(query_start + request + 1) - first_row
    pair = tile % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    row_exists = row < rows
    if tile % tiles * BLOCK_M >= rows * GROUP:
        return
    row = (first_row + row).to(tl.int64)
    dim = tl.arange(0, DIM_PADDED)
    dim_exists = dim < DIM
    wanted = row_exists[:, None] & dim_exists[None, :]
    queries = tl.load(query + row[:, None] * query_row + head[:, None] * query_head + dim[None, :], wanted, other=0.0)
    words = tl.load(ancestors + row, row_exists, other=0)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    column = tl.arange(0, BLOCK_N)

    prefix_scale, prefix_value_scale = scale, 1.0
    if SCALED:
        prefix_scale = scale * tl.load(key_scale)
        prefix_value_scale = tl.load(value_scale)
    prefix = tl.load(prefix_lens + request)
    part = tl.cdiv(tl.cdiv(prefix, SPLITS), BLOCK_N) * BLOCK_N
    end = tl.minimum((split + 1) * part, prefix)
    for begin in range(split * part, end, BLOCK_N):
        token = begin + column
        exists = token < end
        block = tl.load(block_table + request * table_row + token // BLOCK_SIZE, exists, other=0).to(tl.int64)
        inside = token % BLOCK_SIZE
        keys = tl.load(
            key_cache
            + (block * key_cache_block + kv_head * key_cache_head + inside * key_cache_token)[None, :]
            + dim[:, None] * key_cache_dim,
            dim_exists[:, None] & exists[None, :],
            other=0.0,
        ).to(queries.dtype)
        values = tl.load(
            value_cache
            + (block * value_cache_block + kv_head * value_cache_head + inside * value_cache_token)[:, None]
            + dim[None, :] * value_cache_dim,
            exists[:, None] & dim_exists[None, :],
            other=0.0,
        ).to(queries.dtype)
        scores = tl.dot(queries.to(DOT), keys.to(DOT), input_precision="ieee") * prefix_scale
        peak, total, acc = _seen(
            scores, exists[None, :] & row_exists[:, None], values, prefix_value_scale, peak, total, acc, DOT
        )

    if split == SPLITS - 1:
        first_key = tl.load(key_start + request)
        count = tl.load(key_start + request + 1) - first_key
        for begin in range(0, count, BLOCK_N):
            node = begin + column
            exists = node < count
            at = (first_key + node).to(tl.int64)
            keys = tl.load(
                key + at[None, :] * key_row + kv_head * key_head + dim[:, None],
                dim_exists[:, None] & exists[None, :],
                other=0.0,
            )
            values = tl.load(
                value + at[:, None] * value_row + kv_head * value_head + dim[None, :],
                exists[:, None] & dim_exists[None, :],
                other=0.0,
            )
            scores = tl.dot(queries.to(DOT), keys.to(DOT), input_precision="ieee") * scale
            is_ancestor = ((words[:, None] >> node[None, :].to(tl.int64)) & 1) != 0
            peak, total, acc = _seen(
                scores, exists[None, :] & row_exists[:, None] & is_ancestor, values, 1.0, peak, total, acc, DOT
            )

    saw_any = total > 0.0
    acc = acc / tl.where(saw_any, total, 1.0)[:, None]
    place = out + split * out_split + row[:, None] * out_row + head[:, None] * out_head + dim[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), wanted)
    # log2 to natural logarithm
    log_sum = tl.where(saw_any, (peak + tl.log2(tl.where(saw_any, total, 1.0))) * 0.6931471805599453, float("-inf"))
    heads = GROUP * tl.num_programs(1)
    tl.store(lse + (split * heads + head) * all_rows + row, log_sum, row_exists)


@triton.jit
def join_splits_kernel(
    out,  # [R, Hq, D]
    lse,  # float32 [Hq, R]
    parts,  # float32 [SPLITS, R, Hq, D], contiguous
    parts_lse,  # float32 [SPLITS, Hq, R], contiguous
    rows,
    heads,
    out_row,
    out_head,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """One (row, head): its parts weighted by their log-sum-exps."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, dim = tl.arange(0, SPLITS_PADDED), tl.arange(0, DIM_PADDED)
    is_split, is_dim = split < SPLITS, dim < DIM
    sums = tl.load(parts_lse + (split * heads + head) * rows + row, is_split, other=float("-inf"))
    peak = tl.max(sums, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp(sums - base)
    total = tl.sum(weights, 0)
    at = ((split * rows + row) * heads + head)[:, None] * DIM + dim[None, :]
    values = tl.load(parts + at, is_split[:, None] & is_dim[None, :], other=0.0)
    some = tl.where(total > 0.0, total, 1.0)
    joined = tl.sum(values * weights[:, None], 0) / some
    tl.store(out + row * out_row + head * out_head + dim, joined.to(out.dtype.element_ty), is_dim)
    tl.store(lse + head * rows + row, tl.where(total > 0.0, base + tl.log(some), float("-inf")))
