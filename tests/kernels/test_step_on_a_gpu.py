"""The ops of one step on fake tensors of a GPU: what the wrappers allocate and where, and that nothing waits for it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import _native
from adaptivespec_vllm.types import MarginLimits, TreeBatch, VerifyResult

pytestmark = pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")

BATCH, ROWS, DEPTH, VOCAB, HEADS, KV_HEADS, DIM = 2, 6, 3, 1000, 8, 2, 64


@pytest.fixture
def gpu(monkeypatch):
    """Fake tensors on ``cuda``; reading a value of one raises."""
    monkeypatch.setitem(_native._by_device, "cuda", _native._callables(_native.CUDA_OPS))
    with FakeTensorMode():
        yield torch.device("cuda")


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def tree() -> TreeBatch:
    positions, ancestors = (ints(ROWS, dtype=torch.int64) for _ in range(2))
    return TreeBatch(ints(BATCH + 1), ints(ROWS), ints(ROWS), ints(ROWS), positions, ancestors)


def shapes(value: object) -> dict[str, tuple]:
    """Shape, dtype and device of each field."""
    tensors = {name: getattr(value, name) for name in value.__slots__}
    return {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in tensors.items()}


def test_verification(gpu):
    limits = MarginLimits(torch.empty(BATCH, device=gpu), ints(BATCH), torch.empty(BATCH, device=gpu), ints(BATCH, 2))
    logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device=gpu)
    got = ops.walk_trees(logits, tree(), limits, max_depth=DEPTH)
    assert shapes(got) == {
        "paths": ((BATCH, DEPTH), torch.int32, "cuda"),
        "lengths": ((BATCH,), torch.int32, "cuda"),
        "next_tokens": ((BATCH,), torch.int64, "cuda"),
        "promotions": ((BATCH,), torch.int32, "cuda"),
        "regrets": ((BATCH,), torch.float32, "cuda"),
    }


def test_a_step_from_tree_to_commit(gpu):
    batch = tree()
    ops.build_tree_into(batch, ints(BATCH, dtype=torch.int64), ints(BATCH))
    query = torch.empty(ROWS, HEADS, DIM, dtype=torch.bfloat16, device=gpu)
    key = torch.empty(ROWS, KV_HEADS, DIM, dtype=torch.bfloat16, device=gpu)
    cache = torch.empty(2, 10, 16, KV_HEADS, DIM, dtype=torch.bfloat16, device=gpu).transpose(2, 3).unbind()
    out, lse = torch.empty_like(query), torch.empty(HEADS, ROWS, device=gpu)
    ops.tree_part_attention(query, key, key, batch.start, batch.start, batch.ancestors, 0.1, out, lse)
    ops.tree_attention(
        query, key, key, cache[0], cache[1], ints(BATCH, 4), ints(BATCH), batch.start, batch.start, batch.ancestors,
        0.1, out,
    )  # fmt: skip
    result = VerifyResult(
        ints(BATCH, DEPTH), ints(BATCH), ints(BATCH, dtype=torch.int64), ints(BATCH), torch.empty(BATCH, device=gpu)
    )
    workspace = ops.walk_workspace(ROWS, gpu)
    ops.walk_trees_into(result, torch.empty(ROWS, VOCAB, device=gpu), batch, workspace=workspace)
    slots = ints(ROWS, dtype=torch.int64)
    ops.commit_kv([key], [key], [cache[0]], [cache[1]], result.paths, result.lengths, ints(BATCH), slots)
    values, indices = ops.topk_logprobs(torch.empty(BATCH, VOCAB, device=gpu), 4)
    assert (values.shape, values.device.type) == (indices.shape, "cuda") == ((BATCH, 4), "cuda")
    assert (values.dtype, indices.dtype) == (torch.float32, torch.int64)
