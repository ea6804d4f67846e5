"""Times of the ops with CUDA events, against the floor of their bytes and against plain torch.

*Cold*: 256 MB are written before each run, so that inputs come from memory. *Warm*: runs follow one another. A run is
one replay of a CUDA graph that holds the op ten times, so that the host is not what is timed; cold runs hold it once.
On a CPU the same cases run once, untimed by events, to see that they run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.types import MarginLimits, TreeBatch, VerifyResult
from tests.kernels.cases import random_parents

BANDWIDTH = 4.8e12
"""Bytes a second that floors are stated at: an H200. Other machines: their floors scale."""

RUNS, REPEATS = 20, 10


class Case(NamedTuple):
    """One thing to time; ``moved``: bytes that it must read and write."""

    name: str
    moved: int
    ours: Callable[[], object]
    torch: Callable[[], object]


class Timing(NamedTuple):
    """Medians in microseconds; ``ratio``: cold time of ours to the floor."""

    name: str
    floor: float
    warm: float
    cold: float
    torch_cold: float

    @property
    def ratio(self) -> float:
        return self.cold / self.floor


def trees(batch: int, rows: int, device: torch.device) -> TreeBatch:
    """As many random trees, their tokens random."""
    rng = torch.Generator().manual_seed(rows)
    parents = torch.tensor([p for _ in range(batch) for p in random_parents(rows, rng)], dtype=torch.int32)
    start = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32)
    tokens = torch.randint(0, 30000, parents.shape, generator=rng, dtype=torch.int32)
    return ops.build_tree(
        tokens.to(device), parents.to(device), start.to(device), torch.zeros(batch, dtype=torch.int64, device=device)
    )


def limits_of(batch: int, device: torch.device) -> MarginLimits:
    """A margin for every request."""
    return MarginLimits(
        torch.full((batch,), 1.0, device=device),
        torch.full((batch,), -1, dtype=torch.int32, device=device),
        torch.full((batch,), 4.0, device=device),
        torch.full((batch, 2), -1, dtype=torch.int32, device=device),
    )


def walk_cases(device: torch.device, sizes: list[tuple[int, int]], vocab: int) -> Iterator[Case]:
    """The margin check and the walk; torch: maximum and arg-max of the rows and a gather, no walk."""
    for batch, rows in sizes:
        tree, limits = trees(batch, rows, device), limits_of(batch, device)
        logits = torch.randn(batch * rows, vocab, device=device, dtype=torch.bfloat16)
        result = VerifyResult(
            torch.empty(batch, 8, dtype=torch.int32, device=device),
            torch.empty(batch, dtype=torch.int32, device=device),
            torch.empty(batch, dtype=torch.int64, device=device),
            torch.empty(batch, dtype=torch.int32, device=device),
            torch.empty(batch, device=device),
        )
        workspace, index = ops.walk_workspace(batch * rows, device), tree.tokens.long()[:, None]
        yield Case(
            f"walk_trees {batch} x {rows}", logits.nbytes,
            lambda a=(result, logits, tree, limits, None, workspace): ops.walk_trees_into(*a),
            lambda logits=logits, index=index: (logits.max(-1), logits.gather(-1, index)),
        )  # fmt: skip


def commit_cases(device: torch.device, batches: list[int], layers: int) -> Iterator[Case]:
    """Eight accepted nodes a request over all layers; torch: one indexed copy a layer and half."""
    depth, heads, dim, block_size = 8, 8, 128, 16
    for batch in batches:
        rows, blocks = batch * 64, batch * 8
        fresh = [torch.randn(2, rows, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(layers)]
        caches = [
            torch.zeros(2, blocks, block_size, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(layers)
        ]
        paths = torch.arange(1, depth + 1, dtype=torch.int32, device=device).repeat(batch, 1) * 7
        lengths = torch.full((batch,), depth, dtype=torch.int32, device=device)
        roots = torch.arange(0, rows, 64, dtype=torch.int32, device=device)
        slots = torch.randperm(blocks * block_size, device=device)[:rows]
        arguments = (
            [f[0] for f in fresh], [f[1] for f in fresh], [c[0].transpose(1, 2) for c in caches],
            [c[1].transpose(1, 2) for c in caches], paths, lengths, roots, slots,
        )  # fmt: skip
        taken = (roots[:, None] + paths).flatten().long()
        to = slots[(roots[:, None] + 1 + torch.arange(depth, device=device)).flatten().long()]

        def indexed(fresh=fresh, caches=caches, taken=taken, to=to) -> None:
            for rows_of, cache in zip(fresh, caches, strict=True):
                for half in (0, 1):
                    cache[half].view(-1, heads, dim).index_copy_(0, to, rows_of[half][taken])

        moved = 2 * 2 * layers * batch * depth * heads * dim * 2
        name = f"commit_kv {batch} x {depth}, {layers} layers"
        yield Case(name, moved, lambda a=arguments: ops.commit_kv(*a), indexed)


def topk_cases(device: torch.device, sizes: list[int], vocab: int) -> Iterator[Case]:
    """A level's candidates; torch: log-softmax and topk."""
    for rows in sizes:
        logits = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16)
        values = torch.empty(rows, 10, device=device)
        indices = torch.empty(rows, 10, dtype=torch.int64, device=device)
        yield Case(
            f"topk_logprobs {rows} rows", logits.nbytes,
            lambda a=(values, indices, logits): ops.topk_logprobs_into(*a),
            lambda logits=logits: logits.float().log_softmax(-1).topk(10),
        )  # fmt: skip


def part_cases(device: torch.device, sizes: list[tuple[int, int]]) -> Iterator[Case]:
    """The tree part, 32 heads of 128 over 8 KV heads; torch: attention with the mask of a tree."""
    heads, kv_heads, dim = 32, 8, 128
    for batch, rows in sizes:
        tree, count = trees(batch, rows, device), batch * rows
        query = torch.randn(count, heads, dim, device=device, dtype=torch.bfloat16)
        key, value = torch.randn(2, count, kv_heads, dim, device=device, dtype=torch.bfloat16).unbind()
        out, lse = torch.empty_like(query), torch.empty(heads, count, device=device)
        columns = torch.arange(rows, device=device)
        mask = (tree.ancestors.view(batch, 1, rows, 1) >> columns & 1).bool()

        def masked(query=query, key=key, value=value, mask=mask, batch=batch, rows=rows) -> torch.Tensor:
            split = [t.view(batch, rows, -1, dim).transpose(1, 2) for t in (query, key, value)]
            return torch.nn.functional.scaled_dot_product_attention(*split, attn_mask=mask, enable_gqa=True)

        arguments = (query, key, value, tree.start, tree.start, tree.ancestors, dim**-0.5, out, lse)
        moved = 2 * query.nbytes + 2 * key.nbytes + lse.nbytes
        yield Case(
            f"tree_part_attention {batch} x {rows}", moved, lambda a=arguments: ops.tree_part_attention(*a), masked
        )


def build_cases(device: torch.device, batches: list[int]) -> Iterator[Case]:
    """Trees of 64 rows; torch: nothing that does the same, so a copy of as many bytes."""
    for batch in batches:
        tree = trees(batch, 64, device)
        roots = torch.zeros(batch, dtype=torch.int64, device=device)
        status = torch.empty(batch, dtype=torch.int32, device=device)
        yield Case(
            f"build_tree {batch} x 64", 24 * batch * 64,
            lambda a=(tree, roots, status): ops.build_tree_into(*a),
            lambda tree=tree: tree.positions.clone(),
        )  # fmt: skip


def cases(name: str, device: torch.device) -> Iterator[Case]:
    """What is timed of an op; small sizes on a CPU."""
    small = device.type == "cpu"
    grid = [(1, 8)] if small else [(batch, rows) for batch in (1, 8, 64) for rows in (8, 16, 64)]
    if name == "walk_trees":
        yield from walk_cases(device, grid, 32000 if small else 131072)
    elif name == "commit_kv":
        yield from commit_cases(device, [1] if small else [1, 8, 64], 2 if small else 32)
    elif name == "topk_logprobs":
        yield from topk_cases(device, [8] if small else [8, 64, 512], 4000 if small else 32768)
    elif name == "tree_part_attention":
        yield from part_cases(device, grid)
    elif name == "build_tree":
        yield from build_cases(device, [1] if small else [1, 64])


def median_us(call: Callable[[], object], device: torch.device, *, cold: bool) -> float:
    """Of ``RUNS`` runs."""
    if device.type == "cpu":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e6
    flush = torch.empty(1 << 28, dtype=torch.int8, device=device) if cold else None
    repeats = 1 if cold else REPEATS
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS)]
    for begin, end in events:
        if flush is not None:
            flush.fill_(0)
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1000 / repeats


def time_op(name: str, device: torch.device) -> list[Timing]:
    """Every case of an op; that it can be captured in a CUDA graph is part of it."""
    timings = []
    for case in cases(name, device):
        timings.append(
            Timing(
                case.name,
                case.moved / BANDWIDTH * 1e6,
                median_us(case.ours, device, cold=False),
                median_us(case.ours, device, cold=True),
                median_us(case.torch, device, cold=True),
            )
        )
    return timings
