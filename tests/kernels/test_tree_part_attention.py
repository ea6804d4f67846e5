"""tree_part_attention on the CPU: output and log-sum-exp, alone and joined with a prefix."""

from __future__ import annotations

import math

import pytest
import torch

from adaptivespec_vllm import ops
from tests.gpu.attention import check_of
from tests.gpu.checks import check_tree_part_attention
from tests.kernels.cases import attention_case

pytestmark = pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")
CPU = torch.device("cpu")
NAMES = ("query", "tree_key", "tree_value", "query_start", "key_start", "ancestors", "scale")


@pytest.mark.parametrize("seed", range(24))
def test_equals_the_reference(seed):
    check_tree_part_attention(CPU, seed)


@pytest.mark.parametrize("seed", range(8))
def test_joined_with_a_prefix_it_is_the_whole_attention(seed):
    check_of("tree part + torch prefix")(CPU, seed)


def test_a_row_that_sees_nothing_has_no_mass():
    case = attention_case([3], [0])
    case.arguments["ancestors"] = torch.tensor([0, 0b111000, 0b1], dtype=torch.int64)
    out, lse = torch.full((3, 4, 64), math.nan), torch.full((4, 3), math.nan)
    ops.tree_part_attention(**{name: case.arguments[name] for name in NAMES}, out=out, lse=lse)
    assert not out[:2].any()
    assert (lse[:, :2] == -math.inf).all()
    assert torch.isfinite(lse[:, 2]).all()


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("lse must be float32", lambda a: {"lse": a["lse"].double()}),
        ("lse must have size 4 in dimension 0", lambda a: {"lse": a["lse"].t()}),
        ("lse is an output and must not be expanded", lambda a: {"lse": torch.zeros(1, 3).expand(4, 3)}),
        ("key_start must have size 2", lambda a: {"key_start": a["key_start"][:1]}),
        ("request 0 has more than 64 tree keys", lambda a: {
            "tree_key": a["tree_key"].repeat(40, 1, 1), "tree_value": a["tree_value"].repeat(40, 1, 1),
            "key_start": torch.tensor([0, 120], dtype=torch.int32)}),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(message, change):
    case = attention_case([3], [0])
    arguments = {name: case.arguments[name] for name in NAMES}
    arguments |= {"out": torch.zeros(3, 4, 64), "lse": torch.zeros(4, 3)}
    with pytest.raises(RuntimeError, match=message):
        ops.tree_part_attention(**arguments | change(arguments))
