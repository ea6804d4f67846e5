"""The ops of a step with the caller's own outputs: nothing is allocated, and on a GPU nothing waits for it.

For CUDA graphs and other hot paths. Shapes and meanings are those of the wrappers in :mod:`adaptivespec_vllm.ops`; on a
GPU every tensor is on it, and values that do not fit (a row past the batch, a slot past the cache) are passed over,
since reading them to complain would mean waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..types import MarginLimits, TreeBatch, VerifyResult
from . import reference
from ._native import native_op

WALK_WORKSPACE_WORDS = 17
"""``int64`` values a tree row that ``walk_trees_into`` works with on a GPU; their content does not matter."""


def walk_workspace(rows: int, device: torch.device) -> torch.Tensor:
    """Working memory for :func:`walk_trees_into` with up to so many tree rows."""
    return torch.empty((rows, WALK_WORKSPACE_WORDS), dtype=torch.int64, device=device)


def build_tree_into(tree: TreeBatch, root_positions: torch.Tensor, status: torch.Tensor) -> None:
    """Fill ``depths``, ``positions`` and ``ancestors`` of ``tree`` from its ``start`` and ``parents``.

    Args:
        tree: the batch; nothing is written past the first bad row of a tree.
        root_positions: ``int64 [B]``.
        status: ``int32 [B]``, becomes 0, or what is wrong: see :meth:`InvalidTreeError.from_status`.

    """
    op = native_op("build_tree", tree.parents)
    if op is not None:
        op(tree.parents, tree.start, root_positions, tree.depths, tree.positions, tree.ancestors, status)
        return
    built = reference.build_tree(tree.tokens, tree.parents, tree.start, root_positions)
    for name in ("depths", "positions", "ancestors"):
        getattr(tree, name).copy_(getattr(built, name))
    status.zero_()


def walk_trees_into(
    result: VerifyResult,
    logits: torch.Tensor,
    tree: TreeBatch,
    limits: MarginLimits | None = None,
    sampled: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """As :func:`adaptivespec_vllm.ops.walk_trees`, into ``result``; the columns of its ``paths`` bound the depth.

    On a GPU a request without rows gets length 0 and token 0, so that a captured batch may have room to spare.

    Args:
        result: written in full.
        logits: ``[T or more, V]``; a GPU reads all T rows, once.
        tree: the batch's trees; ``start``, ``parents`` and ``tokens`` are read.
        limits: the margin rule's limits; None is strict.
        sampled: ``int64 [T]``, or None: the arg-max.
        workspace: on a GPU :func:`walk_workspace` of at least T rows; otherwise ignored.

    """
    rule: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    if limits is not None:
        rule = (limits.max_log_ratio, limits.max_promotions, limits.max_regret, limits.protected)
    op = native_op("walk_trees", logits)
    if op is not None:
        op(
            logits, tree.start, tree.parents, tree.tokens, sampled, *rule, result.paths, result.lengths,
            result.next_tokens, result.promotions, result.regrets, workspace,
        )  # fmt: skip
        return
    walked = reference.walk_trees(logits, tree, limits, sampled, result.paths.shape[1])
    for name in ("paths", "lengths", "next_tokens", "promotions", "regrets"):
        getattr(result, name).copy_(getattr(walked, name))


def topk_logprobs_into(values: torch.Tensor, indices: torch.Tensor, logits: torch.Tensor) -> None:
    """As :func:`adaptivespec_vllm.ops.topk_logprobs`, into ``float32 [R, k]`` and ``int64 [R, k]``."""
    k = values.shape[1]
    op = native_op("topk_logprobs", logits)
    if op is not None:
        op(logits, k, values, indices)
        return
    for to, found in zip((values, indices), reference.topk_logprobs(logits, k), strict=True):
        to.copy_(found)


def tree_part_attention(
    query: torch.Tensor,
    tree_key: torch.Tensor,
    tree_value: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention of tree rows over their visible tree keys alone, to be merged with that over the prefix.

    On tensor cores for bfloat16 and float16 with head sizes 64, 80, 96, 128 and 256 and strides that are multiples of
    8 elements; otherwise one warp a row.

    Args:
        query: ``[Tq, Hq, D]`` float32, bfloat16 or float16; D contiguous.
        tree_key: ``[Tk, Hkv, D]``, at most 64 rows a request.
        tree_value: ``[Tk, Hkv, D]``.
        query_start: ``int32 [B + 1]``, each request's rows of ``query``.
        key_start: ``int32 [B + 1]``, each request's rows of ``tree_key``.
        ancestors: ``int64 [Tq]``, bit j set: row j of the request's tree keys is visible. Bits past them are ignored.
        scale: factor of the scores.
        out: ``[Tq, Hq, D]``, written for the rows of the B requests; a row that sees no key becomes zeros.
        lse: ``float32 [Hq, Tq]`` with any strides, log of the sum of exp(score); -inf for a row that sees no key.

    """
    op = native_op("tree_part_attention", query)
    if op is not None:
        op(out, lse, query, tree_key, tree_value, query_start, key_start, ancestors, scale)
        return
    reference.tree_part_attention(query, tree_key, tree_value, query_start, key_start, ancestors, scale, out, lse)


def commit_kv(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    paths: torch.Tensor,
    lengths: torch.Tensor,
    root_rows: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Copy the keys and values of the accepted rows to consecutive slots behind their roots, in all layers.

    The j-th accepted node of request b is row ``root_rows[b] + paths[b, j]`` and goes to the slot of row
    ``root_rows[b] + 1 + j``: where it would be if the accepted nodes were a sequence. Strides are free but the same in
    every layer, so vLLM's caches fit as views: ``cache[:, 0].transpose(1, 2)`` of ``[blocks, 2, block_size, Hkv, D]``,
    ``cache[0].transpose(1, 2)`` of ``[2, blocks, block_size, Hkv, D]``.

    Args:
        keys: a layer each, ``[R, Hkv, D]``, fresh keys of the batch's rows.
        values: the same for values.
        key_caches: a layer each, ``[blocks, Hkv, block_size, D]``, of the same dtype, of any kind.
        value_caches: the same for values.
        paths: ``int32 [B, depth]`` accepted tree rows.
        lengths: ``int32 [B]``, how many of them.
        root_rows: ``int32 [B]``, row of each root.
        slots: ``int64 [R]``, each row's place in the cache if the rows were a sequence; negative: copy nothing there.

    """
    op = native_op("commit_kv", slots)
    function = reference.commit_kv if op is None else op
    function(list(keys), list(values), list(key_caches), list(value_caches), paths, lengths, root_rows, slots)
