"""draft_input and draft_layer against their references in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import DraftLayer, LevelPlaces, PackedLinear, reference

from .cases import attention_case, generator

pytestmark = pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")


def input_case(rows: int, size: int, norm_before_residual: bool) -> dict[str, Any]:
    rng = generator(rows)
    return {
        "tokens": torch.randint(0, 50, (rows,), generator=rng),
        "parent_rows": torch.randint(0, 4, (rows,), generator=rng),
        "embeddings": torch.randn(50, size, generator=rng) * 0.1,
        "hidden": torch.randn(4, size + 3, generator=rng)[:, :size] * 10,
        "embed_norm": torch.randn(size, generator=rng),
        "hidden_norm": torch.randn(size, generator=rng),
        "eps": 1e-3,
        "norm_before_residual": norm_before_residual,
    }


def in_double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("size", [1, 15, 16, 64, 577])
def test_input_equals_the_reference(size, norm_before_residual):
    for rows in (0, 1, 3, 9):
        case = input_case(rows, size, norm_before_residual)
        got = ops.draft_input(**case)
        want = reference.draft_input(**{name: in_double(value) for name, value in case.items()})
        for mine, theirs in zip(got, want, strict=True):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", torch.tensor([0, 50]), "token 1 is 50"),
        ("tokens", torch.tensor([-1, 0]), "token 0 is -1"),
        ("parent_rows", torch.tensor([0, 4]), "parent row 1 is 4"),
        ("embed_norm", torch.ones(7), "embed_norm must have size 8"),
        ("embeddings", torch.ones(50, 8, dtype=torch.bfloat16), "embeddings must be float32"),
    ],
)
def test_bad_inputs_are_refused(name, value, message):
    with pytest.raises(RuntimeError, match=message):
        ops.draft_input(**(input_case(2, 8, False) | {name: value}))


def layer_case(
    rows: list[int],
    prefixes: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    size: int = 48,
    inner: int = 80,
    inputs: int = 96,
    rotated: int | None = None,
    biases: bool = False,
    head_norms: bool = False,
) -> dict[str, Any]:
    """The last level of random trees: each request's last two rows, their ancestors in the scratch already."""
    attention = attention_case(
        rows, prefixes, heads=heads, kv_heads=kv_heads, dim=dim, last_queries=2, layout="strided"
    ).arguments
    rng = generator(sum(rows))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    def linear(outputs: int, inputs: int) -> PackedLinear:
        return PackedLinear.pack(randn(outputs, inputs) / math.sqrt(inputs), randn(outputs) if biases else None)

    layer = DraftLayer(
        qkv=linear((heads + 2 * kv_heads) * dim, inputs),
        q_norm=randn(dim) if head_norms else None,
        k_norm=randn(dim) if head_norms else None,
        o=linear(size, heads * dim),
        post_norm=randn(size),
        gate_up=linear(2 * inner, size),
        down=linear(size, inner),
        cos_sin=torch.randn(40, rotated or dim, generator=rng).clamp(-1, 1),
        scale=dim**-0.5,
        eps=1e-3,
    )
    count = attention["query"].shape[0]
    start, key_start = attention["query_start"], attention["key_start"]
    slots = [row for b, total in enumerate(rows) for row in range(total - int(start[b + 1] - start[b]), total)]
    places = LevelPlaces(
        positions=torch.randint(0, 40, (count,), generator=rng),
        start=start,
        scratch_rows=torch.tensor(slots, dtype=torch.int64),
        ancestors=attention["ancestors"],
        key_start=key_start,
        prefix_lens=attention["prefix_lens"],
        block_table=attention["block_table"],
    )
    return {
        "x": randn(count, inputs),
        "residual": randn(count, size) * 3,
        "layer": layer,
        "next_norm": randn(size),
        "places": places,
        "keys": attention["tree_key"].clone(memory_format=torch.contiguous_format),
        "values": attention["tree_value"].clone(memory_format=torch.contiguous_format),
        "key_cache": attention["key_cache"],
        "value_cache": attention["value_cache"],
    }


def check(case: dict[str, Any]) -> None:
    twin = {name: in_double(value) for name, value in case.items()}
    want = reference.draft_layer(**twin)
    got = ops.draft_layer(**case)
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    for name in ("residual", "keys", "values"):
        torch.testing.assert_close(case[name].double(), twin[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("head_norms", [False, True])
def test_layer_equals_the_reference(head_norms, biases):
    for rows, prefixes in (
        ([1], [0]),
        ([2], [31]),
        ([9], [70]),
        ([3, 1, 12, 64], [5, 0, 33, 100]),
        ([5] * 8, [17] * 8),
    ):
        check(layer_case(rows, prefixes, biases=biases, head_norms=head_norms))


@pytest.mark.parametrize(
    "sizes",
    [
        {"size": 7, "inner": 5, "inputs": 3},
        {"size": 64, "inputs": 64},
        {"heads": 9, "kv_heads": 3, "dim": 64},
        {"heads": 1, "kv_heads": 1, "dim": 18},
        {"dim": 40, "rotated": 20},
    ],
)
def test_layers_of_awkward_sizes(sizes):
    check(layer_case([3, 6], [20, 40], **sizes))


def test_no_rows():
    case = layer_case([2], [10])
    places = dataclasses.replace(
        case["places"],
        positions=torch.empty(0, dtype=torch.int64),
        scratch_rows=torch.empty(0, dtype=torch.int64),
        ancestors=torch.empty(0, dtype=torch.int64),
        start=torch.zeros(2, dtype=torch.int32),
    )
    case |= {"places": places, "x": case["x"][:0], "residual": case["residual"][:0]}
    assert ops.draft_layer(**case).shape == (0, 48)


def test_the_threads_change_nothing():
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(ops.draft_layer(**layer_case([9, 20], [300, 40], size=576, inner=300)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.tensor([0, 40])}, "position 1 is 40"),
        ({"scratch_rows": torch.tensor([3, 5])}, "scratch row 1 is 5"),
        ({"scratch_rows": torch.tensor([-1, 3])}, "scratch row 0 is -1"),
        ({"start": torch.tensor([0, 1], dtype=torch.int32)}, "query_start must cover the 2 rows"),
        ({"prefix_lens": torch.tensor([1000], dtype=torch.int32)}, "does not fit"),
    ],
)
def test_places_that_are_not_there_are_refused(change, message):
    case = layer_case([5], [10])
    case["places"] = dataclasses.replace(case["places"], **change)
    with pytest.raises(RuntimeError, match=message):
        ops.draft_layer(**case)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o": PackedLinear.pack(torch.zeros(48, 100))}, "no multiple of the head size"),
        ({"down": PackedLinear.pack(torch.zeros(90, 80))}, "down must have size 2"),
        ({"gate_up": PackedLinear.pack(torch.zeros(80, 48))}, "gate_up must have size 5"),
        ({"q_norm": torch.ones(16)}, "q_norm must have size 32"),
        ({"cos_sin": torch.zeros(40, 34)}, "34 values a position for heads of 32"),
        ({"post_norm": torch.ones(48).double()}, "post_norm must be float32"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message):
    case = layer_case([5], [10])
    case["layer"] = dataclasses.replace(case["layer"], **change)
    with pytest.raises(RuntimeError, match=message):
        ops.draft_layer(**case)
