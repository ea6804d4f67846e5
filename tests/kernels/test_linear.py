"""linear against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import PackedLinear, reference

from .cases import generator

pytestmark = pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 33, 64)
SHAPES = ((1, 1), (7, 5), (31, 64), (32, 3), (33, 17), (64, 64), (100, 33), (257, 576), (96, 1025))
"""(outputs, inputs)"""


def layer_of(outputs: int, inputs: int, bias: bool = False, seed: int = 0) -> PackedLinear:
    rng = generator(seed)
    weight = torch.randn(outputs, inputs, generator=rng)
    return PackedLinear.pack(weight, torch.randn(outputs, generator=rng) if bias else None)


def native(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    out = torch.full((x.shape[0], layer.outputs), math.nan)
    torch.ops.adaptivespec.linear(out, x, layer.weight, layer.bias)
    return out


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_reference(rows, bias):
    for outputs, inputs in SHAPES:
        layer = layer_of(outputs, inputs, bias, seed=rows)
        x = torch.randn(rows, inputs, generator=generator(inputs))
        want = reference.linear(x.double(), layer)
        torch.testing.assert_close(native(x, layer).double(), want, atol=1e-5 * math.sqrt(inputs), rtol=1e-5)
        assert torch.equal(ops.linear(x, layer), native(x, layer))


def test_packing_keeps_every_bfloat16_value():
    weight = torch.randn(70, 33, generator=generator(1)).bfloat16().float()
    assert torch.equal(PackedLinear.pack(weight).unpacked(), weight)


def test_sums_are_float32():
    """What a sum in bfloat16, or of rounded inputs, would lose."""
    layer = PackedLinear.pack(torch.ones(40, 3))
    x = torch.tensor([[1.0, 2.0**-12, 2.0**-20]]).repeat(3, 1)
    assert torch.equal(native(x, layer), torch.full((3, 40), 1.0 + 2.0**-12 + 2.0**-20))


def test_a_row_does_not_depend_on_the_others_nor_on_the_threads():
    layer = layer_of(576, 200)
    x = torch.randn(64, 200, generator=generator(3))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            together = native(x, layer)
            for rows in (1, 3, 8):
                assert torch.equal(native(x[:rows], layer), together[:rows])
    finally:
        torch.set_num_threads(threads)


def test_strided_rows():
    layer = layer_of(50, 20, bias=True)
    x = torch.randn(6, 64, generator=generator(4))
    out = torch.full((6, 80), math.nan)
    torch.ops.adaptivespec.linear(out[:, 10:60], x[:, 7:27], layer.weight, layer.bias)
    assert torch.equal(out[:, 10:60], native(x[:, 7:27].contiguous(), layer))
    assert out[:, :10].isnan().all() and out[:, 60:].isnan().all()


def test_inputs_that_are_not_numbers_stay_in_their_row():
    layer = layer_of(33, 10)
    x = torch.zeros(4, 10)
    x[2, 3] = math.nan
    assert native(x, layer).isnan().all(dim=1).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(x=a["x"].double()), "x must be float32"),
        (lambda a: a.update(x=a["x"].T.contiguous().T), "contiguous in its last dimension"),
        (lambda a: a.update(x=a["x"][:, :-1]), "weight must have size 19"),
        (lambda a: a.update(weight=a["weight"].float()), "weight must be bfloat16"),
        (lambda a: a.update(weight=a["weight"][:-1]), "weight must have size 2"),
        (lambda a: a.update(bias=a["bias"][:-1]), "weight must have size 40"),
        (lambda a: a.update(out=torch.zeros(1, 40).expand(3, 40)), "must not be expanded"),
        (lambda a: a.update(out=torch.zeros(2, 40)), "out must have size 3"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    layer = layer_of(40, 20, bias=True)
    arguments = {"out": torch.zeros(3, 40), "x": torch.zeros(3, 20), "weight": layer.weight, "bias": layer.bias}
    change(arguments)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.adaptivespec.linear(**arguments)
