"""Random trees, batches and paged caches for the kernel tests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.attention import TreePlaces
from adaptivespec_vllm.types import MarginLimits, TreeBatch, VerifyResult

VOCAB = 40
FIELDS = ("paths", "lengths", "next_tokens", "promotions", "regrets")
LAYOUTS = ("transposed_keys", "token_major", "strided")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randint(low: int, high: int, rng: torch.Generator) -> int:
    return int(torch.randint(low, high, (), generator=rng))


def random_parents(rows: int, rng: torch.Generator, chain: bool = False) -> list[int]:
    return [-1] + [row - 1 if chain else randint(0, row, rng) for row in range(1, rows)]


def batch(
    parents: list[list[int]], tokens: list[list[int]] | None = None, positions: list[int] | None = None
) -> TreeBatch:
    """A tree batch from parent lists (each begins with -1) and token lists (roots included)."""
    start = torch.tensor([0, *torch.tensor([len(p) for p in parents]).cumsum(0).tolist()], dtype=torch.int32)
    flat = [p for tree in parents for p in tree]
    flat_tokens = [t for tree in tokens for t in tree] if tokens is not None else [0] * len(flat)
    roots = torch.tensor(positions if positions is not None else [0] * len(parents), dtype=torch.int64)
    return ops.build_tree(
        torch.tensor(flat_tokens, dtype=torch.int32), torch.tensor(flat, dtype=torch.int32), start, roots
    )


def limits(
    requests: int = 1,
    kappa: float = 0.2,
    max_promotions: int = -1,
    max_regret: float = math.inf,
    protected: tuple[int, ...] = (),
) -> MarginLimits:
    return MarginLimits(
        max_log_ratio=torch.full((requests,), math.log(1 / kappa) if kappa else math.inf),
        max_promotions=torch.full((requests,), max_promotions, dtype=torch.int32),
        max_regret=torch.full((requests,), max_regret),
        protected=torch.tensor([[*protected, -1]] * requests, dtype=torch.int32),
    )


def assert_equal(got: VerifyResult, want: VerifyResult) -> None:
    for name in FIELDS:
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), f"{name}: {a} != {b}"


def random_batch(seed: int, requests: int, vocab: int = VOCAB, chain: bool = False) -> tuple[TreeBatch, torch.Tensor]:
    """Trees whose tokens often are among the best of coarse logits, so that matches, ties and promotions occur."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 30, (requests,), generator=rng).tolist()
    parents = [random_parents(size, rng, chain) for size in sizes]
    logits = torch.randint(-6, 4, (sum(sizes), vocab), generator=rng) * 0.75
    first, tokens = 0, []
    for tree in parents:
        mine = [0]
        for parent in tree[1:]:
            best = logits[first + parent].topk(min(4, vocab)).indices.tolist()
            mine.append(best[int(torch.randint(0, len(best), (), generator=rng))])
        tokens.append(mine)
        first += len(tree)
    return batch(parents, tokens), logits


def random_limits(seed: int, requests: int) -> MarginLimits:
    rng = torch.Generator().manual_seed(seed)
    return MarginLimits(
        max_log_ratio=torch.rand(requests, generator=rng) * 4 - 1,
        max_promotions=torch.randint(-1, 3, (requests,), generator=rng, dtype=torch.int32),
        max_regret=torch.where(torch.rand(requests, generator=rng) < 0.5, torch.inf, 2.0),
        protected=torch.randint(-1, 20, (requests, 3), generator=rng, dtype=torch.int32),
    )


@dataclass
class AttentionCase:
    """Arguments of ``tree_attention`` and what an oracle needs beside them."""

    arguments: dict
    tree: TreeBatch
    keys: list[torch.Tensor]
    """Per request ``[prefix, Hkv, D]``, what the paged cache holds."""
    values: list[torch.Tensor]

    def run(self, function=ops.tree_attention, poison: float = math.nan) -> torch.Tensor:
        out = torch.full_like(self.arguments["query"], poison)
        function(**self.arguments, out=out)
        return out


def paged_cache(blocks: int, heads: int, block_size: int, dim: int, dtype: torch.dtype, layout: str):
    """NaN-filled logical ``[blocks, heads, block_size, dim]`` key and value caches in a storage layout."""
    nan = math.nan
    if layout == "transposed_keys":  # vLLM's CPU backend: halves of one block, the key half transposed
        storage = torch.full((blocks, heads, 2 * block_size, dim), nan, dtype=dtype)
        key, value = storage.chunk(2, dim=2)
        key = key.as_strided(key.shape, (key.stride(0), key.stride(1), 1, block_size), key.storage_offset())
        return key, value
    if layout == "token_major":
        return tuple(torch.full((blocks, heads, block_size, dim), nan, dtype=dtype) for _ in range(2))
    if layout == "packed":  # vLLM's CUDA backends: keys beside values, token-major in memory
        storage = torch.full((blocks, block_size, heads, 2 * dim), nan, dtype=dtype).transpose(1, 2)
        return storage[..., :dim], storage[..., dim:]
    assert layout == "strided"  # nothing is contiguous
    return tuple(
        torch.full((dim + 1, block_size, blocks, heads + 2), nan, dtype=dtype).permute(2, 3, 1, 0)[:, 1:-1, :, :dim]
        for _ in range(2)
    )


def attention_case(
    rows: list[int],
    prefixes: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    block_size: int = 32,
    dtype: torch.dtype = torch.float32,
    layout: str = "transposed_keys",
    seed: int = 0,
    last_queries: int | None = None,
    chain: bool = False,
) -> AttentionCase:
    """A batch with one random tree a request, in a cache whose blocks are dealt at random.

    ``last_queries``: only the last so many rows of each tree query (the newest level of a draft).
    """
    rng = generator(seed)
    tree = batch([random_parents(n, rng, chain) for n in rows])

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    needed = [-(-prefix // block_size) for prefix in prefixes]
    total = sum(needed) + 3
    order = torch.randperm(total, generator=rng)
    key_cache, value_cache = paged_cache(total, kv_heads, block_size, dim, dtype, layout)
    table = torch.full((len(rows), max(needed) + 1), -1, dtype=torch.int32)  # unused entries are not valid blocks
    keys, values, used = [], [], 0
    for request, prefix in enumerate(prefixes):
        blocks = order[used : used + needed[request]]
        used += needed[request]
        table[request, : len(blocks)] = blocks.int()
        key, value = randn(prefix, kv_heads, dim), randn(prefix, kv_heads, dim)
        positions = torch.arange(prefix)
        slots = blocks[positions // block_size], slice(None), positions % block_size
        key_cache[slots], value_cache[slots] = key, value
        keys.append(key)
        values.append(value)

    count = sum(rows)
    taken, query_start = [], [0]
    for request in range(len(rows)):
        first, last = int(tree.start[request]), int(tree.start[request + 1])
        mine = list(range(first if last_queries is None else max(first, last - last_queries), last))
        taken += mine
        query_start.append(query_start[-1] + len(mine))
    # Query and fresh K/V as slices of one projection, as a model gives them: strided rows.
    projection = randn(count, heads + 2 * kv_heads, dim)
    arguments = dict(
        query=projection[:, :heads] if last_queries is None else projection[taken, :heads],
        tree_key=projection[:, heads : heads + kv_heads],
        tree_value=projection[:, heads + kv_heads :],
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=table,
        prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        query_start=torch.tensor(query_start, dtype=torch.int32),
        key_start=tree.start,
        ancestors=tree.ancestors[taken].contiguous(),
        scale=dim**-0.5,
    )
    return AttentionCase(arguments, tree, keys, values)


def in_float64(case: AttentionCase) -> AttentionCase:
    """The same case in float64, for the reference."""
    arguments = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in case.arguments.items()
    }
    return AttentionCase(arguments, case.tree, [k.double() for k in case.keys], [v.double() for v in case.values])


def places_of(arguments: dict) -> TreePlaces:
    """Where the rows of a case stand, as implementations of tree attention are told; from its arguments."""
    query_start, key_start = arguments["query_start"], arguments["key_start"]
    return TreePlaces(
        block_table=arguments["block_table"],
        prefix_lens=arguments["prefix_lens"],
        query_start=query_start,
        key_start=key_start,
        ancestors=arguments["ancestors"],
        prefixes=arguments["prefix_lens"].tolist(),
        queries=query_start.diff().tolist(),
        keys=key_start.diff().tolist(),
    )
