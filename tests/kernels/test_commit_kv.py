"""commit_kv on the CPU: the rows of accepted paths and nothing else, in every layout; what is refused."""

from __future__ import annotations

import pytest
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import reference
from tests.gpu.checks import check_commit_kv

needs_native = pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")


@needs_native
@pytest.mark.parametrize("seed", range(16))
def test_equals_the_reference(seed):
    check_commit_kv(torch.device("cpu"), seed)


@pytest.mark.parametrize("function", [pytest.param(ops.commit_kv, marks=needs_native), reference.commit_kv])
def test_the_example_of_the_header(function):
    """root a b c d, accepted b and d: b to the slot of a, d to that of b."""
    fresh = [torch.arange(5.0).view(5, 1, 1).expand(5, 1, 2).contiguous()]
    keys, values = ([torch.zeros(2, 1, 4, 2)] for _ in range(2))
    places = (
        torch.tensor([[2, 4, -1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32), torch.tensor([2, 3, 4, 5, 6]),
    )  # fmt: skip
    function(fresh, fresh, keys, values, *places)
    assert keys[0][:, 0, :, 0].flatten().tolist() == [0, 0, 0, 2, 4, 0, 0, 0]
    assert torch.equal(values[0], keys[0])


@needs_native
@pytest.mark.parametrize(
    ("message", "index", "change"),
    [
        ("must have one tensor a layer, got 2, 1, 1 and 1", 0, lambda t: t * 2),
        ("keys must have the dtype of the caches", 0, lambda t: [t[0].half()]),
        ("keys must have a row for each of the 5 slots", 0, lambda t: [t[0][:4]]),
        ("values must have size 2 in dimension 2", 1, lambda t: [t[0][..., :1]]),
        ("key_caches is an output and must not be expanded", 2, lambda t: [t[0][:, :, :1].expand(2, 1, 4, 2)]),
        ("lengths must be int32", 5, lambda t: t.long()),
        ("slots must be int64", 7, lambda t: t.int()),
    ],
)
def test_bad_arguments_are_refused(message, index, change):
    fresh, cache = [torch.zeros(5, 1, 2)], [torch.zeros(2, 1, 4, 2)]
    one = torch.zeros(1, dtype=torch.int32)
    arguments = [fresh, fresh, cache, cache, one[None], one, one, torch.zeros(5, dtype=torch.int64)]
    arguments[index] = change(arguments[index])
    with pytest.raises(RuntimeError, match=message):
        ops.commit_kv(*arguments)


@needs_native
def test_layers_of_different_strides_are_refused():
    fresh = [torch.zeros(5, 1, 2)] * 2
    caches = [torch.zeros(2, 1, 4, 2), torch.zeros(2, 1, 4, 3)[..., :2]]
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="must have the same strides in every layer"):
        ops.commit_kv(fresh, fresh, caches, caches, one[None], one, one, torch.zeros(5, dtype=torch.int64))
