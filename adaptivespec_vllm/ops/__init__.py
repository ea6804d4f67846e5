"""The ops of a decoding step, one typed wrapper each.

On CPU tensors a wrapper calls the native op of the same name (``torch.ops.adaptivespec.*``), which checks its
arguments itself; anywhere else, or when the native ops are not built, the plain-torch twin in
:mod:`adaptivespec_vllm.ops.reference`.
"""

from __future__ import annotations

import torch

from ..types import MarginLimits, TreeBatch, VerifyResult
from . import _fake, reference
from ._native import describe, native_ops_loaded
from .errors import InvalidTreeError
from .layers import DraftLayer, LevelPlaces, PackedLinear

__all__ = [
    "build_tree",
    "walk_trees",
    "tree_attention",
    "tree_part_attention",
    "topk_logprobs",
    "linear",
    "draft_input",
    "draft_layer",
    "DraftLayer",
    "LevelPlaces",
    "PackedLinear",
    "InvalidTreeError",
    "native_ops_loaded",
    "describe",
]

_NATIVE = native_ops_loaded()
if _NATIVE:
    _build_tree, _walk_trees, _tree_attention, _topk_logprobs, _linear, _draft_input, _draft_layer = (
        getattr(torch.ops.adaptivespec, name).default for name in _fake.OPS
    )


def build_tree(
    tokens: torch.Tensor, parents: torch.Tensor, start: torch.Tensor, root_positions: torch.Tensor
) -> TreeBatch:
    """Depths, positions and ancestor words of every tree of a batch.

    Args:
        tokens: ``int32 [T]``, token ids, roots included; passed through.
        parents: ``int32 [T]``, parent row within the tree, -1 at roots.
        start: ``int32 [B + 1]``, first row of each tree.
        root_positions: ``int64 [B]``, absolute position of each root.

    Raises:
        InvalidTreeError: a tree has no root, more than 64 rows, or a parent that is not an earlier row; it names
            the request and the row.

    """
    if not (_NATIVE and parents.is_cpu):
        return reference.build_tree(tokens, parents, start, root_positions)
    depths = torch.empty_like(parents)
    positions = torch.empty(parents.shape, dtype=torch.int64)
    ancestors = torch.empty_like(positions)
    status = torch.empty(root_positions.shape, dtype=torch.int32)
    _build_tree(parents, start, root_positions, depths, positions, ancestors, status)
    for request, code in enumerate(status.tolist()):
        if code:
            raise InvalidTreeError.from_status(request, code)
    return TreeBatch(start, tokens, parents, depths, positions, ancestors)


def walk_trees(
    logits: torch.Tensor,
    tree: TreeBatch,
    limits: MarginLimits | None = None,
    sampled: torch.Tensor | None = None,
    max_depth: int | None = None,
) -> VerifyResult:
    """Which draft nodes the target accepts, and the token that follows them.

    At each node, from the root: a child that holds the target's choice is taken (the first such child). Otherwise, if
    ``limits`` allow, the child with the largest logit is **promoted** when it is within ``max_log_ratio`` nats of the
    row's maximum and the regret of this step stays within ``max_regret``; a protected token is neither promoted to
    nor away from, and a logit of -inf never passes. Otherwise the walk stops and emits the target's choice.

    Args:
        logits: ``[T, V]`` float32, bfloat16 or float16, target logits after each tree row; rows may be strided. Only
            the rows that the walk visits are read.
        tree: the batch's trees.
        limits: the margin rule's limits; None is strict.
        sampled: ``int64 [T]``, the target's choice after each row. None: the arg-max of the row, the lowest index
            of equals; a NaN counts as the maximum, as in ``torch.argmax``. A promotion is impossible at a row with
            a NaN.
        max_depth: columns of ``paths``, and the depth at which the walk ends at the latest. None: the deepest node.

    """
    if not (_NATIVE and logits.is_cpu):
        return reference.walk_trees(logits, tree, limits, sampled, max_depth)
    if max_depth is None:
        max_depth = reference._deepest(tree)
    requests = tree.start.shape[0] - 1
    paths = torch.empty((requests, max_depth), dtype=torch.int32)
    lengths, promotions = torch.empty((2, requests), dtype=torch.int32).unbind()
    next_tokens = torch.empty(requests, dtype=torch.int64)
    regrets = torch.empty(requests, dtype=torch.float32)
    if limits is None:
        rule: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    else:
        rule = (limits.max_log_ratio, limits.max_promotions, limits.max_regret, limits.protected)
    _walk_trees(
        logits, tree.start, tree.parents, tree.tokens, sampled, *rule, paths, lengths, next_tokens, promotions, regrets
    )
    return VerifyResult(paths, lengths, next_tokens, promotions, regrets)


def tree_attention(
    query: torch.Tensor,
    tree_key: torch.Tensor,
    tree_value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attention of tree rows over (paged prefix) ∪ (visible tree keys), into ``out``.

    Args:
        query: ``[Tq, Hq, D]`` float32, bfloat16 or float16; D contiguous, other strides free.
        tree_key: ``[Tk, Hkv, D]``, fresh keys of the tree rows, D contiguous; at most 64 rows a request.
        tree_value: ``[Tk, Hkv, D]``, likewise.
        key_cache: ``[num_blocks, Hkv, block_size, D]`` with any strides.
        value_cache: the same.
        block_table: ``int32 [B, max_blocks]``.
        prefix_lens: ``int32 [B]``, tokens read from the cache; may be 0.
        query_start: ``int32 [B + 1]``, each request's rows of ``query``.
        key_start: ``int32 [B + 1]``, each request's rows of ``tree_key``.
        ancestors: ``int64 [Tq]``, bit j set: row j of the request's tree keys is visible. Bits past them are ignored.
        scale: factor of the scores.
        out: ``[Tq, Hq, D]``, written in full for the rows of the B requests; a row that sees no key becomes zeros.

    """
    if _NATIVE and query.is_cpu:
        _tree_attention(
            out, query, tree_key, tree_value, key_cache, value_cache, block_table, prefix_lens, query_start,
            key_start, ancestors, scale,
        )  # fmt: skip
        return
    reference.tree_attention(
        query, tree_key, tree_value, key_cache, value_cache, block_table, prefix_lens, query_start, key_start,
        ancestors, scale, out,
    )  # fmt: skip


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
    """Attention of tree rows over the visible tree keys alone, with log-sum-exps to join it with a prefix part.

    Args:
        query: ``[Tq, Hq, D]`` float32, bfloat16 or float16; D contiguous, other strides free.
        tree_key: ``[Tk, Hkv, D]``, fresh keys of the tree rows, D contiguous; at most 64 rows a request.
        tree_value: ``[Tk, Hkv, D]``, likewise.
        query_start: ``int32 [B + 1]``, each request's rows of ``query``.
        key_start: ``int32 [B + 1]``, each request's rows of ``tree_key``.
        ancestors: ``int64 [Tq]``, bit j set: row j of the request's tree keys is visible. Bits past them are ignored.
        scale: factor of the scores.
        out: ``[Tq, Hq, D]``, written in full; a row that sees no key becomes zeros.
        lse: ``float32 [Hq, Tq]``, written in full, natural logarithm; -inf where a row sees no key.

    """
    reference.tree_part_attention(query, tree_key, tree_value, query_start, key_start, ancestors, scale, out, lse)


def topk_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely tokens of each row with their log-probabilities, most likely first.

    Args:
        logits: ``[R, V]`` float32, bfloat16 or float16; V contiguous.
        k: 1..64, at most V.

    Returns:
        ``float32 [R, k]`` log-softmax values and ``int64 [R, k]`` indices; equal logits: the lower index first.

    """
    if not (_NATIVE and logits.is_cpu):
        return reference.topk_logprobs(logits, k)
    shape = (logits.shape[0], k)
    values, indices = torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.int64)
    _topk_logprobs(logits, k, values, indices)
    return values, indices


def linear(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """A linear layer on few rows, bound by reading its packed weights once.

    Sums are float32, in the order of the inputs: the weights being bfloat16 values, nothing is rounded that a float32
    copy of them would not round.

    Args:
        x: ``float32 [M, K]``; K contiguous.
        layer: the weights and the bias.

    Returns:
        ``float32 [M, N]``.

    """
    if not (_NATIVE and x.is_cpu):
        return reference.linear(x, layer)
    out = torch.empty(x.shape[0], layer.outputs)
    _linear(out, x, layer.weight, layer.bias)
    return out


def draft_input(
    tokens: torch.Tensor,
    parent_rows: torch.Tensor,
    embeddings: torch.Tensor,
    hidden: torch.Tensor,
    embed_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
    norm_before_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the first layer of an EAGLE-3 head starts from: the nodes' tokens and their parents' hidden states.

    Args:
        tokens: ``int64 [R]``.
        parent_rows: ``int64 [R]``, rows of ``hidden``.
        embeddings: ``float32 [V, H]``.
        hidden: ``float32 [P, H]``.
        embed_norm: ``float32 [H]``, weights of the norm of the embeddings.
        hidden_norm: ``float32 [H]``, weights of the norm of the hidden states.
        eps: of both norms.
        norm_before_residual: the residual is the normalised hidden state instead of the hidden state.

    Returns:
        ``float32 [R, 2 H]`` normalised embeddings beside normalised hidden states, and the residual ``float32 [R, H]``.

    """
    if not (_NATIVE and hidden.is_cpu):
        return reference.draft_input(
            tokens, parent_rows, embeddings, hidden, embed_norm, hidden_norm, eps, norm_before_residual
        )
    rows, size = tokens.shape[0], hidden.shape[1]
    x, residual = torch.empty(rows, 2 * size), torch.empty(rows, size)
    _draft_input(
        x, residual, tokens, parent_rows, embeddings, hidden, embed_norm, hidden_norm, eps, norm_before_residual
    )
    return x, residual


def draft_layer(
    x: torch.Tensor,
    residual: torch.Tensor,
    layer: DraftLayer,
    next_norm: torch.Tensor,
    places: LevelPlaces,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> torch.Tensor:
    """One decoder layer of a draft head over the rows of a level.

    Args:
        x: ``float32 [R, H]``, for the first layer ``[R, 2 H]``: normalised input.
        residual: ``float32 [R, H]``; the outputs of attention and MLP are added to it.
        layer: the layer's weights.
        next_norm: ``float32 [H]``, weights of the norm that follows the layer.
        places: where the rows stand.
        keys: ``float32 [Tk, Hkv, D]``, scratch of the expanded nodes; the rows' own keys are written to it.
        values: the same for values.
        key_cache: ``float32 [blocks, Hkv, block_size, D]`` with any strides.
        value_cache: the same.

    Returns:
        ``float32 [R, H]``, the residual after the layer, normalised.

    """
    if not (_NATIVE and x.is_cpu):
        return reference.draft_layer(x, residual, layer, next_norm, places, keys, values, key_cache, value_cache)
    normed = torch.empty_like(residual)
    qkv, o, gate_up, down = layer.qkv, layer.o, layer.gate_up, layer.down
    _draft_layer(
        normed, residual, keys, values, x, qkv.weight, qkv.bias, layer.q_norm, layer.k_norm, o.weight, o.bias,
        layer.post_norm, gate_up.weight, gate_up.bias, down.weight, down.bias, next_norm, layer.eps, layer.cos_sin,
        places.positions, places.scratch_rows, key_cache, value_cache, places.block_table, places.prefix_lens,
        places.start, places.key_start, places.ancestors, layer.scale,
    )  # fmt: skip
    return normed
