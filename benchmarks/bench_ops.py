"""Times of the native ops, one line a case: median and spread, beside what they are compared with.

``tree_attention`` is compared with vLLM's CPU attention kernel for the same number of rows as an ordinary causal
chunk, on the same cache, interleaved; ``walk_trees``, ``topk_logprobs`` and ``linear`` with plain torch; a level of
the demo's head on packed weights (``draft_input``, ``draft_layer``, ``linear``) with the same level on vLLM's modules.
Every case checks its result first.

    python benchmarks/bench_ops.py                       # all ops
    python benchmarks/bench_ops.py attention --threads 1 --json ops.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import reference
from adaptivespec_vllm.types import MarginLimits


class Case(NamedTuple):
    """One thing to time, and what it is compared with."""

    name: str
    ours: Callable[[], object]
    other: Callable[[], object]
    other_name: str


def random_tree(rows: int, rng: torch.Generator) -> list[int]:
    return [-1] + [int(torch.randint(max(0, row - 4), row, (), generator=rng)) for row in range(1, rows)]


def tree_batch(rows: list[int], rng: torch.Generator, tokens: torch.Tensor | None = None):
    parents = torch.tensor([parent for count in rows for parent in random_tree(count, rng)], dtype=torch.int32)
    start = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    tokens = torch.zeros(sum(rows), dtype=torch.int32) if tokens is None else tokens
    return ops.build_tree(tokens, parents, start, torch.zeros(len(rows), dtype=torch.int64))


def attention_case(
    rows: int, prefix: int, *, batch: int, heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> Case:
    """Our op with a random tree, and vLLM's kernel with a causal chunk of as many rows."""
    import vllm._custom_ops as vllm_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    rng = torch.Generator().manual_seed(0)
    isa = _get_attn_isa(dtype, block_size, dim)
    length = prefix + rows
    blocks = -(-length // block_size)
    cache = torch.zeros(batch * blocks + 1, kv_heads, 2 * block_size, dim, dtype=dtype)
    vllm_key, vllm_value = cache.chunk(2, dim=2)
    table = (torch.randperm(batch * blocks, generator=rng).reshape(batch, blocks) + 1).int()
    key = torch.randn(batch, length, kv_heads, dim, generator=rng).to(dtype)
    value = torch.randn(batch, length, kv_heads, dim, generator=rng).to(dtype)
    positions = torch.arange(length)
    slots = table[:, positions // block_size].long() * block_size + positions % block_size
    vllm_ops.cpu_attn_reshape_and_cache(
        key.flatten(0, 1), value.flatten(0, 1), vllm_key, vllm_value, slots.flatten(), isa
    )

    query = torch.randn(batch * rows, heads, dim, generator=rng).to(dtype)
    query_start = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32)
    seq_lens = torch.full((batch,), length, dtype=torch.int32)
    metadata = vllm_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, seq_lens=seq_lens, dtype=dtype,
        query_start_loc=query_start, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True,
    )  # fmt: skip
    scale = dim**-0.5
    causal_out = torch.empty_like(query)

    def causal_chunk() -> None:
        vllm_ops.cpu_attention_with_kv_cache(
            query, vllm_key, vllm_value, causal_out, query_start, seq_lens, scale, True, None, -1, table, 0.0,
            metadata, None,
        )  # fmt: skip

    # The key half of a block is stored transposed.
    key_cache = vllm_key.as_strided(
        vllm_key.shape, (vllm_key.stride(0), vllm_key.stride(1), 1, block_size), vllm_key.storage_offset()
    )
    tree = tree_batch([rows] * batch, rng)
    tree_key, tree_value = key[:, prefix:].flatten(0, 1), value[:, prefix:].flatten(0, 1)
    prefix_lens = torch.full((batch,), prefix, dtype=torch.int32)
    out = torch.empty_like(query)

    def arguments(ancestors: torch.Tensor) -> tuple:
        return (query, tree_key, tree_value, key_cache, vllm_value, table, prefix_lens, query_start, query_start,
                ancestors, scale, out)  # fmt: skip

    # A chain sees what the causal chunk sees: both kernels must agree.
    chain = torch.tensor([(2 << row) - 1 for row in range(rows)], dtype=torch.int64).repeat(batch)
    causal_chunk()
    ops.tree_attention(*arguments(chain))
    torch.testing.assert_close(out, causal_out, atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=2e-2)

    mine = arguments(tree.ancestors)
    shape = f"B{batch} rows {rows} prefix {prefix} heads {heads}/{kv_heads} D{dim} block {block_size}"
    name = f"attention {shape} {str(dtype).removeprefix('torch.')}"
    return Case(name, lambda: ops.tree_attention(*mine), causal_chunk, "vllm causal chunk")


def attention_cases() -> Iterator[Case]:
    smol = {"batch": 1, "heads": 9, "kv_heads": 3, "dim": 64, "block_size": 128, "dtype": torch.float32}
    for rows in (1, 4, 9, 17, 33, 49, 62):
        yield attention_case(rows, 300, **smol)
    for prefix in (0, 64, 1000, 4000):
        yield attention_case(9, prefix, **smol)
    for block_size in (16, 32, 64):
        yield attention_case(9, 300, **{**smol, "block_size": block_size})
    for count in (4, 8):
        yield attention_case(9, 300, **{**smol, "batch": count})
    for dtype in (torch.bfloat16, torch.float16):
        yield attention_case(9, 300, **{**smol, "dtype": dtype})
        yield attention_case(49, 300, **{**smol, "dtype": dtype})
    llama = {"batch": 1, "heads": 32, "kv_heads": 8, "dim": 128, "block_size": 128}
    yield attention_case(9, 500, **llama, dtype=torch.float32)
    yield attention_case(49, 500, **llama, dtype=torch.float32)
    yield attention_case(49, 500, **llama, dtype=torch.bfloat16)


def walk_cases() -> Iterator[Case]:
    for batch, rows, vocab in ((1, 9, 49152), (8, 9, 49152), (1, 49, 49152), (1, 9, 151936), (1, 9, 256000)):
        rng = torch.Generator().manual_seed(1)
        logits = torch.randn(batch * rows, vocab, generator=rng)
        best = logits.argmax(-1).int()
        tree = tree_batch([rows] * batch, rng)
        # Each node holds its parent's choice: the walk goes as deep as the first such child leads.
        first = tree.start[:-1].repeat_interleave(rows)
        tree.tokens = torch.where(tree.parents < 0, 0, best[(first + tree.parents.clamp_min(0)).long()])
        limits = MarginLimits(
            torch.full((batch,), 1.6), torch.full((batch,), -1, dtype=torch.int32), torch.full((batch,), torch.inf),
            torch.full((batch, 1), -1, dtype=torch.int32),
        )  # fmt: skip
        want = reference.walk_trees(logits, tree, limits, max_depth=10)
        got = ops.walk_trees(logits, tree, limits, max_depth=10)
        assert torch.equal(got.paths, want.paths) and torch.equal(got.next_tokens, want.next_tokens)
        visited = int((got.lengths + 1).sum())
        yield Case(
            f"walk B{batch} rows {rows} V {vocab}, {visited} rows visited",
            lambda logits=logits, tree=tree, limits=limits: ops.walk_trees(logits, tree, limits, max_depth=10),
            lambda logits=logits, visited=visited: logits[:visited].argmax(-1),
            "torch argmax of the visited rows",
        )


def topk_cases() -> Iterator[Case]:
    for rows, vocab, k in (
        (1, 32000, 4),
        (4, 32000, 4),
        (10, 32000, 10),
        (1, 128256, 10),
        (10, 128256, 10),
        (64, 4096, 8),
    ):
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2))
        assert torch.equal(ops.topk_logprobs(logits, k)[1], reference.topk_logprobs(logits, k)[1])
        yield Case(
            f"topk R {rows} V {vocab} k {k}",
            lambda logits=logits, k=k: ops.topk_logprobs(logits, k),
            lambda logits=logits, k=k: logits.log_softmax(-1).topk(k),
            "torch log_softmax + topk",
        )


def build_cases() -> Iterator[Case]:
    rng = torch.Generator().manual_seed(3)
    for batch, rows in ((1, 9), (8, 64)):
        tree = tree_batch([rows] * batch, rng)
        arguments = (tree.tokens, tree.parents, tree.start, torch.zeros(batch, dtype=torch.int64))
        yield Case(
            f"build B{batch} rows {rows}",
            lambda arguments=arguments: ops.build_tree(*arguments),
            lambda arguments=arguments: reference.build_tree(*arguments),
            "reference",
        )


HEAD_LAYERS = ((960, 1152), (576, 576), (3072, 576), (576, 1536), (4096, 576))
"""(outputs, inputs) of the demo's head: together they do not stay in the caches of a core."""


def linear_cases() -> Iterator[Case]:
    rng = torch.Generator().manual_seed(4)
    weights = [torch.randn(shape, generator=rng).bfloat16().float() for shape in HEAD_LAYERS]
    layers = [ops.PackedLinear.pack(weight) for weight in weights]
    for rows in (1, 2, 4, 8, 16, 64, 256):
        inputs = [torch.randn(rows, weight.shape[1], generator=rng) for weight in weights]
        for x, weight, layer in zip(inputs, weights, layers, strict=True):
            torch.testing.assert_close(ops.linear(x, layer), x @ weight.T, atol=1e-3, rtol=1e-4)
        yield Case(
            f"linear M {rows}, the five layers of the demo's head",
            lambda inputs=inputs: [ops.linear(x, layer) for x, layer in zip(inputs, layers, strict=True)],
            lambda inputs=inputs: [
                torch.nn.functional.linear(x, weight) for x, weight in zip(inputs, weights, strict=True)
            ],
            "torch linear, float32",
        )


def level_cases() -> Iterator[Case]:
    """Levels of siblings behind 300 tokens; the engine that the head comes from is started for it."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    from adaptivespec_vllm.demo.model import prepare
    from adaptivespec_vllm.draft import LevelRows
    from adaptivespec_vllm.runtime import cache_dir

    demo = prepare(cache_dir(), print)
    tree = {"policy": "static", "shape": {"depth": 5, "width": 4, "nodes": 8}}
    llm = LLM(
        str(demo.model), dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=64 << 20,
        speculative_config={"method": "adaptivespec", "model": str(demo.head), "tree": tree},
    )  # fmt: skip
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    head = worker.model_runner.drafter.head
    packed = head._packed
    assert packed is not None
    hidden = torch.randn(1, 576, generator=torch.Generator().manual_seed(5))
    table = torch.arange(64, dtype=torch.int32)[None]
    for rows in (1, 2, 3, 4, 6, 8, 16):
        level = LevelRows(
            tokens=torch.arange(rows),
            parent_rows=torch.zeros(rows, dtype=torch.int64),
            positions=torch.full((rows,), 300),
            start=torch.tensor([0, rows], dtype=torch.int32),
            scratch_rows=torch.arange(rows),
            ancestors=1 << torch.arange(rows),
        )

        @torch.inference_mode()
        def run(weights: object, level: LevelRows = level) -> torch.Tensor:
            head._packed, head._hidden = weights, hidden
            return head.level(level)

        head.begin(hidden, torch.tensor([300], dtype=torch.int32), table, 16)
        torch.testing.assert_close(run(packed), run(None), atol=1e-3, rtol=1e-3)
        yield Case(
            f"level R {rows}, the demo's head behind 300 tokens",
            lambda run=run: run(packed),
            lambda run=run: run(None),
            "vllm modules",
        )


def interleaved(case: Case, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds a call of both sides, measured in turns so that a slow spell hits both."""
    start = time.perf_counter()
    for _ in range(5):
        case.ours()
    calls = max(1, int(2e-3 / ((time.perf_counter() - start) / 5)))
    case.other()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for function, into in zip((case.ours, case.other), times, strict=True):
            function()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            into.append((time.perf_counter() - start) / calls)
    return times


def provenance() -> dict:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or None,
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ops": ops.describe(),
    }


def main() -> None:
    groups = {
        "attention": attention_cases,
        "walk": walk_cases,
        "topk": topk_cases,
        "build": build_cases,
        "linear": linear_cases,
        "level": level_cases,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", choices=[[], *groups], help="which ops (default: all)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    about = provenance()
    print(json.dumps(about))
    results = []
    for group in options.groups or groups:
        for case in groups[group]():
            if options.only not in case.name:
                continue
            ours, other = interleaved(case, options.rounds)
            line = {
                "case": case.name,
                "us": statistics.median(ours) * 1e6,
                "us_min": min(ours) * 1e6,
                "compared_with": case.other_name,
                "other_us": statistics.median(other) * 1e6,
                "other_us_min": min(other) * 1e6,
                "ratio": statistics.median(other) / statistics.median(ours),
                "ratio_of_min": min(other) / min(ours),
                "rounds": options.rounds,
            }
            results.append(line)
            print(
                f"{line['case']:<72} {line['us']:8.1f} us (min {line['us_min']:.1f})  {case.other_name} "
                f"{line['other_us']:.1f} us (min {line['other_us_min']:.1f})  "
                f"{line['ratio']:.2f}x (of min {line['ratio_of_min']:.2f}x)",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=2))


if __name__ == "__main__":
    main()
