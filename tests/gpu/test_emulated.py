"""The CUDA kernels and their host side, run on the CPU: the checks that a GPU machine runs, and what is refused."""

from __future__ import annotations

import pytest
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import _native, into
from tests.gpu.checks import CHECKS, DTYPES, HEAD_SIZES, TOLERANCE, error_of
from tests.kernels.cases import attention_case, batch, in_float64

pytestmark = pytest.mark.usefixtures("emulated")
CPU = torch.device("cpu")
SEEDS = {"build_tree": 6, "walk_trees": 16, "topk_logprobs": 10, "tree_attention": 12, "tree_part_attention": 24,
         "commit_kv": 16}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_equals_the_reference(name):
    for seed in range(SEEDS[name]):
        CHECKS[name](CPU, seed)


@pytest.mark.parametrize("dim", HEAD_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tile_of_tensor_cores(dim, dtype):
    case = attention_case([64, 17], [0, 0], heads=4, kv_heads=1, dim=dim, dtype=dtype)
    names = ("query", "tree_key", "tree_value", "query_start", "key_start", "ancestors", "scale")
    out, lse = torch.full((81, 4, dim), torch.nan, dtype=dtype), torch.full((4, 81), torch.nan)
    ops.tree_part_attention(**{name: case.arguments[name] for name in names}, out=out, lse=lse)
    exact = in_float64(case).arguments
    want, want_lse = torch.empty_like(exact["query"]), torch.empty(4, 81, dtype=torch.float64)
    into.reference.tree_part_attention(**{name: exact[name] for name in names}, out=want, lse=want_lse)
    error_of(out, want, TOLERANCE[dtype])
    error_of(lse, want_lse, 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_in_several_parts(dtype):
    """The emulated machine is small: two rows are read in parts from 16384 values on."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 70001, generator=rng).to(dtype)
    logits[1, 66000] = 50
    tree = batch([[-1], [-1]])
    assert ops.walk_trees(logits, tree).next_tokens.tolist() == logits.argmax(-1).tolist()


def test_a_request_without_rows_is_passed_over():
    tree = batch([[-1, 0], [-1]], [[0, 5], [0]])
    tree.start = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    logits = torch.zeros(3, 40)
    logits[0, 5] = logits[1, 6] = logits[2, 7] = 1.0
    got = ops.walk_trees(logits, tree, max_depth=2)
    assert (got.lengths.tolist(), got.next_tokens.tolist()) == ([1, 0, 0], [6, 0, 7])
    assert got.paths.tolist() == [[1, -1], [-1, -1], [-1, -1]]


def test_indices_past_their_tensors_are_not_followed():
    case = attention_case([4], [40])
    case.arguments["block_table"] = torch.full_like(case.arguments["block_table"], 10**6)
    assert torch.isfinite(case.run()).all()  # the tree alone is left
    tree = batch([[-1, 0]], [[0, 5]])
    tree.start = torch.tensor([0, 900], dtype=torch.int32)
    assert ops.walk_trees(torch.zeros(2, 40), tree, max_depth=1).lengths.tolist() == [0]
    caches = [torch.zeros(2, 1, 4, 8)]
    fresh = [torch.ones(3, 1, 8)]
    one = torch.ones(1, dtype=torch.int32)
    for root, path, slot in ((0, 1, 8), (0, 9, 0), (5, 1, 0), (-1, 1, 0), (0, 1, -1)):
        ops.commit_kv(fresh, fresh, caches, caches, one[None] * path, one, one * root, torch.full((3,), slot))
        assert not caches[0].any()


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("workspace must be given", lambda a: a | {"workspace": None}),
        ("workspace must have a row for each of the 2", lambda a: a | {"workspace": a["workspace"][:1]}),
        ("workspace must have size 17", lambda a: a | {"workspace": torch.zeros(2, 3, dtype=torch.int64)}),
        ("logits must be float32", lambda a: a | {"logits": a["logits"].double()}),
        ("tokens must have size 2", lambda a: a | {"tokens": a["tokens"][:1]}),
    ],
)
def test_bad_arguments_are_refused(message, call):
    tree = batch([[-1, 0]])
    ints = torch.zeros(1, dtype=torch.int32)
    arguments = {
        "logits": torch.zeros(2, 40), "start": tree.start, "parents": tree.parents, "tokens": tree.tokens,
        "sampled": None, "max_log_ratio": None, "max_promotions": None, "max_regret": None, "protected_tokens": None,
        "paths": torch.zeros(1, 1, dtype=torch.int32), "lengths": ints, "next_tokens": ints.long(),
        "promotions": ints, "regrets": torch.zeros(1), "workspace": ops.walk_workspace(2, CPU),
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        torch.ops.adaptivespec_emulated.walk_trees(**call(arguments))


def test_heads_too_large_are_refused():
    case = attention_case([2], [0], dim=320)
    with pytest.raises(RuntimeError, match="head size must be at most 256 on CUDA, got 320"):
        case.run()


def test_every_op_is_emulated():
    assert set(CHECKS) == set(_native.CUDA_OPS)
