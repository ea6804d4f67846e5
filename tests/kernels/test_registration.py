"""Schemas, fake kernels and aliasing of every op, as PyTorch's own checker sees them."""

from __future__ import annotations

import pytest
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops._fake import OPS

from .cases import attention_case, batch
from .test_draft_layer import input_case, layer_case
from .test_linear import layer_of

pytestmark = pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def samples() -> dict[str, list[tuple]]:
    tree = batch([[-1, 0, 1, 1], [-1]], [[0, 3, 4, 5], [7]])
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    walked = (empty(2, 2), empty(2), empty(2, dtype=torch.int64), empty(2), empty(2, dtype=torch.float32))
    rule = (torch.ones(2), empty(2) - 1, torch.full((2,), torch.inf), empty(2, 1) - 1)
    attention = dict(attention_case([3, 1], [5, 0]).arguments)
    query = attention.pop("query")
    scale = attention.pop("scale")
    part = [attention[name] for name in ("tree_key", "tree_value", "query_start", "key_start", "ancestors")]
    layer = [torch.ones(4, 2, 8)], [torch.zeros(3, 2, 4, 8)]  # fresh rows, a cache
    accepted = (empty(2, 3) + 1, empty(2), empty(2), empty(4, dtype=torch.int64))
    long = torch.int64
    linear = layer_of(40, 20, bias=True)
    start = input_case(3, 16, False).values()
    return {
        "build_tree": [
            (
                tree.parents,
                tree.start,
                empty(2, dtype=long),
                empty(5),
                empty(5, dtype=long),
                empty(5, dtype=long),
                empty(2),
            )
        ],
        "walk_trees": [
            (logits, tree.start, tree.parents, tree.tokens, None, None, None, None, None, *walked),
            (logits, tree.start, tree.parents, tree.tokens, empty(5, dtype=long), *rule, *walked),
        ],
        "tree_attention": [(torch.zeros(4, 4, 64), query, *attention.values(), scale)],
        "tree_part_attention": [(torch.zeros(4, 4, 64), torch.zeros(4, 4), query, *part, scale)],
        "commit_kv": [(layer[0], layer[0], layer[1], [torch.zeros(3, 2, 4, 8)], *accepted)],
        "topk_logprobs": [(logits, 3, torch.zeros(5, 3), empty(5, 3, dtype=long))],
        "linear": [(torch.zeros(3, 40), torch.ones(3, 20), linear.weight, bias) for bias in (None, linear.bias)],
        "draft_input": [(torch.zeros(3, 32), torch.zeros(3, 16), *start)],
        "draft_layer": [layer_arguments(biases=False), layer_arguments(biases=True)],
    }


def layer_arguments(*, biases: bool) -> tuple:
    """The op takes the wrapper's weights and places one by one."""
    case = layer_case([3, 1], [5, 0], biases=biases, head_norms=biases)
    layer, places = case["layer"], case["places"]
    return (
        torch.zeros_like(case["residual"]), case["residual"], case["keys"], case["values"], case["x"],
        layer.qkv.weight, layer.qkv.bias, layer.q_norm, layer.k_norm, layer.o.weight, layer.o.bias, layer.post_norm,
        layer.gate_up.weight, layer.gate_up.bias, layer.down.weight, layer.down.bias, case["next_norm"], layer.eps,
        layer.cos_sin, places.positions, places.scratch_rows, case["key_cache"], case["value_cache"],
        places.block_table, places.prefix_lens, places.start, places.key_start, places.ancestors, layer.scale,
    )  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    for arguments in samples()[name]:
        torch.library.opcheck(getattr(torch.ops.adaptivespec, name).default, arguments)


def test_every_op_is_registered_and_has_a_wrapper():
    assert set(OPS) == set(samples())
    for name in OPS:
        assert callable(getattr(ops, name))
        assert getattr(torch.ops.adaptivespec, name).default is not None


def test_describe_names_the_instruction_set():
    assert ops.describe()["cpu"] in {f"native ({isa})" for isa in ("avx512", "avx2", "portable")}
