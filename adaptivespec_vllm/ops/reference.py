"""Plain-torch twins of the native ops: readable, slow, the fallback and the oracle of the tests.

Signatures are those of the wrappers in :mod:`adaptivespec_vllm.ops`, where the semantics are documented.
"""

from __future__ import annotations

import torch

from ..types import MAX_TREE_ROWS, MarginLimits, TreeBatch, VerifyResult
from .errors import InvalidTreeError
from .layers import DraftLayer, LevelPlaces, PackedLinear


def build_tree(
    tokens: torch.Tensor, parents: torch.Tensor, start: torch.Tensor, root_positions: torch.Tensor
) -> TreeBatch:
    """See :func:`adaptivespec_vllm.ops.build_tree`."""
    bounds, flat_parents, roots = start.tolist(), parents.tolist(), root_positions.tolist()
    depths, positions, ancestors = [0] * len(flat_parents), [0] * len(flat_parents), [0] * len(flat_parents)
    for request, root_position in enumerate(roots):
        first, last = bounds[request], bounds[request + 1]
        if first == last or flat_parents[first] != -1:
            raise InvalidTreeError(request, 0, InvalidTreeError.NO_ROOT)
        if last - first > MAX_TREE_ROWS:
            raise InvalidTreeError(request, MAX_TREE_ROWS, InvalidTreeError.TOO_LARGE)
        for row in range(first, last):
            parent = flat_parents[row]
            if row == first:
                depths[row], word = 0, 0
            elif 0 <= parent < row - first:
                depths[row], word = depths[first + parent] + 1, ancestors[first + parent]
            else:
                raise InvalidTreeError(request, row - first, InvalidTreeError.PARENT_ORDER)
            positions[row] = root_position + depths[row]
            ancestors[row] = word | 1 << (row - first)
    signed = [word - (1 << 64) if word >> 63 else word for word in ancestors]
    device = parents.device
    return TreeBatch(
        start=start,
        tokens=tokens,
        parents=parents,
        depths=torch.tensor(depths, dtype=torch.int32, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        ancestors=torch.tensor(signed, dtype=torch.int64, device=device),
    )


def walk_trees(
    logits: torch.Tensor,
    tree: TreeBatch,
    limits: MarginLimits | None = None,
    sampled: torch.Tensor | None = None,
    max_depth: int | None = None,
) -> VerifyResult:
    """See :func:`adaptivespec_vllm.ops.walk_trees`."""
    start, parents, tokens = tree.start.tolist(), tree.parents.tolist(), tree.tokens.tolist()
    capacity = _deepest(tree) if max_depth is None else max_depth
    paths, next_tokens, promotions, regrets = [], [], [], []
    for request in range(len(start) - 1):
        first, last = start[request], start[request + 1]
        rule = _MarginRule(limits, request)
        path: list[int] = []
        row = 0
        while True:
            scores = logits[first + row].float()
            choice = int(scores.argmax()) if sampled is None else int(sampled[first + row])
            if len(path) == capacity:
                break
            children = [child for child in range(row + 1, last - first) if parents[first + child] == row]
            child_tokens = [tokens[first + child] for child in children]
            if choice in child_tokens:
                row = children[child_tokens.index(choice)]
            else:
                promoted = rule.promote(scores, choice, children, child_tokens)
                if promoted is None:
                    break
                row = promoted
            path.append(row)
        paths.append(path + [-1] * (capacity - len(path)))
        next_tokens.append(choice)
        promotions.append(rule.promotions)
        regrets.append(float(rule.regret))
    device = logits.device
    return VerifyResult(
        paths=torch.tensor(paths, dtype=torch.int32, device=device).reshape(len(paths), capacity),
        lengths=torch.tensor([sum(row >= 0 for row in path) for path in paths], dtype=torch.int32, device=device),
        next_tokens=torch.tensor(next_tokens, dtype=torch.int64, device=device),
        promotions=torch.tensor(promotions, dtype=torch.int32, device=device),
        regrets=torch.tensor(regrets, dtype=torch.float32, device=device),
    )


class _MarginRule:
    """The margin rule for one request, with what it has spent in this step."""

    def __init__(self, limits: MarginLimits | None, request: int) -> None:
        self.promotions = 0
        self.regret = torch.zeros((), dtype=torch.float32)
        self.active = limits is not None and float(limits.max_log_ratio[request]) >= 0
        if limits is not None:
            self.max_log_ratio = limits.max_log_ratio[request].cpu()
            self.max_promotions = int(limits.max_promotions[request])
            self.max_regret = limits.max_regret[request].cpu()
            self.protected = set(limits.protected[request].tolist()) - {-1}

    def promote(self, scores: torch.Tensor, choice: int, children: list[int], child_tokens: list[int]) -> int | None:
        """The child to promote although it is not the target's choice, or None."""
        if not self.active or choice in self.protected:
            return None
        if 0 <= self.max_promotions <= self.promotions:
            return None
        best, best_score = None, torch.tensor(-torch.inf)
        for child, token in zip(children, child_tokens, strict=True):
            if token in self.protected or not 0 <= token < scores.numel():
                continue
            score = scores[token].cpu()
            if score > best_score:
                best, best_score = child, score
        gap = scores.max().cpu() - best_score  # max() is NaN if any score is: no comparison holds then
        if best is None or not gap <= self.max_log_ratio or not self.regret + gap <= self.max_regret:
            return None
        self.promotions += 1
        self.regret = self.regret + gap
        return best


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
    """See :func:`adaptivespec_vllm.ops.tree_attention`; float64 inputs are computed in float64."""
    compute = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key_cache.shape[1]
    block_size = key_cache.shape[2]
    queries, tree_rows, prefixes = query_start.tolist(), key_start.tolist(), prefix_lens.tolist()
    for request, prefix in enumerate(prefixes):
        rows = slice(queries[request], queries[request + 1])
        fresh = slice(tree_rows[request], tree_rows[request + 1])
        blocks = block_table[request, : -(-prefix // block_size)].long()

        keys = _keys_of(key_cache[blocks], prefix, tree_key[fresh], group).to(compute)
        values = _keys_of(value_cache[blocks], prefix, tree_value[fresh], group).to(compute)
        columns = torch.arange(fresh.stop - fresh.start, device=query.device)
        in_tree = (ancestors[rows, None] >> columns & 1).bool()  # [queries, tree keys]
        visible = torch.cat([in_tree.new_ones(in_tree.shape[0], prefix), in_tree], dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[rows].to(compute), keys) * scale
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        weights = weights.masked_fill(~visible, 0.0)  # a row that sees no key: zeros, not NaN
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


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
    """See :func:`adaptivespec_vllm.ops.tree_part_attention`; without a wait for the device."""
    compute = torch.promote_types(query.dtype, torch.float32)
    rows, keys = query.shape[0], tree_key.shape[0]
    group = query.shape[1] // tree_key.shape[1]
    index = torch.arange(max(rows, keys), device=query.device)
    of_row = torch.searchsorted(query_start[1:].contiguous(), index[:rows].int(), right=True)  # [R], their requests
    column = index[None, :keys] - key_start[of_row].long()[:, None]
    in_tree = (column >= 0) & (index[None, :keys] < key_start[of_row + 1].long()[:, None])
    visible = in_tree & (ancestors[:, None] >> column.clamp(0, MAX_TREE_ROWS - 1) & 1).bool()

    fresh_keys, fresh_values = (t.to(compute).repeat_interleave(group, dim=1) for t in (tree_key, tree_value))
    scores = torch.einsum("qhd,khd->hqk", query.to(compute), fresh_keys) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    lse.copy_(scores.logsumexp(-1))
    weights = scores.softmax(-1).masked_fill(~visible, 0.0)  # a row that sees no key: zeros, not NaN
    out.copy_(torch.einsum("hqk,khd->qhd", weights, fresh_values))


def commit_kv(
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    key_caches: list[torch.Tensor],
    value_caches: list[torch.Tensor],
    paths: torch.Tensor,
    lengths: torch.Tensor,
    root_rows: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See :func:`adaptivespec_vllm.ops.commit_kv`."""
    rows, targets = [], []
    for path, length, root in zip(paths.tolist(), lengths.tolist(), root_rows.tolist(), strict=True):
        for place, row in enumerate(path[:length]):
            slot = int(slots[root + 1 + place])
            if slot >= 0:
                rows.append(root + row)
                targets.append(slot)
    device = slots.device
    taken, to = (
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(targets, dtype=torch.int64).to(device),
    )
    for fresh, cache in zip((*keys, *values), (*key_caches, *value_caches), strict=True):
        cache[to // cache.shape[2], :, to % cache.shape[2]] = fresh[taken]


def _keys_of(blocks: torch.Tensor, prefix: int, fresh: torch.Tensor, group: int) -> torch.Tensor:
    """``[prefix + tree keys, Hq, D]``: the used tokens of paged blocks and the fresh rows, one a query head."""
    paged = blocks.transpose(1, 2).flatten(0, 1)[:prefix]  # [prefix, Hkv, D]
    return torch.cat([paged, fresh]).repeat_interleave(group, dim=1)


def topk_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`adaptivespec_vllm.ops.topk_logprobs`."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A stable sort keeps the lower index first among equals; topk promises no order. The order is that of the
    # logits: two of them may share a rounded log-probability.
    indices = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return scores.log_softmax(-1).gather(-1, indices), indices


def linear(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """See :func:`adaptivespec_vllm.ops.linear`; like the two below, computed in the dtype of its first argument."""
    out = x @ layer.unpacked().to(x.dtype).T
    return out if layer.bias is None else out + layer.bias


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
    """See :func:`adaptivespec_vllm.ops.draft_input`."""
    state = hidden[parent_rows]
    normed = _rms_norm(state, hidden_norm, eps)
    embedded = _rms_norm(embeddings[tokens], embed_norm, eps)
    return torch.cat([embedded, normed], dim=-1), normed if norm_before_residual else state


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
    """See :func:`adaptivespec_vllm.ops.draft_layer`."""
    kv_heads, dim = keys.shape[1:]
    fused = linear(x, layer.qkv).unflatten(-1, (-1, dim))  # [R, Hq + 2 Hkv, D]
    query, key, value = fused.split([fused.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if layer.q_norm is not None:
        query = _rms_norm(query, layer.q_norm, layer.eps)
    if layer.k_norm is not None:
        key = _rms_norm(key, layer.k_norm, layer.eps)
    cos_sin = layer.cos_sin[places.positions].to(x.dtype)
    query, key = _rotate(query, cos_sin), _rotate(key, cos_sin)

    own = torch.repeat_interleave(places.key_start[:-1].long(), places.start.diff()) + places.scratch_rows
    keys[own], values[own] = key, value
    context = torch.empty_like(query)
    tree_attention(
        query, keys, values, key_cache, value_cache, places.block_table, places.prefix_lens, places.start,
        places.key_start, places.ancestors, layer.scale, context,
    )  # fmt: skip

    residual += linear(context.flatten(1), layer.o)
    gate, up = linear(_rms_norm(residual, layer.post_norm, layer.eps), layer.gate_up).chunk(2, dim=-1)
    residual += linear(torch.nn.functional.silu(gate) * up, layer.down)
    return _rms_norm(residual, next_norm, layer.eps)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(heads: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``[R, heads, D]``; dimensions past those of ``cos_sin [R, rotated]`` stay."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _deepest(tree: TreeBatch) -> int:
    return int(tree.depths.max()) if tree.depths.numel() else 0
