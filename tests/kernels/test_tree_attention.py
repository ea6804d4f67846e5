"""tree_attention against its reference in float64 and against an independent oracle."""

from __future__ import annotations

import math

import pytest
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import reference

from .cases import LAYOUTS, AttentionCase, attention_case, in_float64

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

needs_native = pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")


def check(case: AttentionCase, tolerance: float | None = None) -> None:
    got, want = case.run(), in_float64(case).run(reference.tree_attention)
    tolerance = tolerance or TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def unrolled(case: AttentionCase) -> torch.Tensor:
    """Every row as the last token of an ordinary causal sequence: prefix, then its path from the root."""
    arguments, tree = case.arguments, case.tree
    group = arguments["query"].shape[1] // arguments["tree_key"].shape[1]
    out = torch.empty_like(arguments["query"])
    for request, prefix_keys in enumerate(case.keys):
        first, last = int(tree.start[request]), int(tree.start[request + 1])
        for row in range(first, last):
            path = []
            node = row - first
            while node >= 0:  # by parent rows: the ancestor words are not used
                path.insert(0, first + node)
                node = int(tree.parents[first + node])
            keys = torch.cat([prefix_keys, arguments["tree_key"][path]]).repeat_interleave(group, dim=1)
            values = torch.cat([case.values[request], arguments["tree_value"][path]]).repeat_interleave(group, dim=1)
            queries = torch.zeros_like(keys)
            queries[-1] = arguments["query"][row]
            attended = torch.nn.functional.scaled_dot_product_attention(
                queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), is_causal=True,
                scale=arguments["scale"],
            )  # fmt: skip
            out[row] = attended[:, -1]
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("function", [ops.tree_attention, reference.tree_attention])
def test_equals_every_path_unrolled(function, seed):
    case = in_float64(attention_case([9, 1, 5], [70, 3, 0], seed=seed))
    want = unrolled(case)
    if function is ops.tree_attention:
        case = attention_case([9, 1, 5], [70, 3, 0], seed=seed)
    torch.testing.assert_close(case.run(function).double(), want, atol=1e-5, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [16, 32, 128, 7, 48])
def test_layouts_and_dtypes(layout, dtype, block_size):
    check(attention_case([9, 3], [150, 33], layout=layout, dtype=dtype, block_size=block_size))


@needs_native
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_grouped_heads(group):
    check(attention_case([7, 12], [40, 65], heads=3 * group, kv_heads=3, seed=group))


@needs_native
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("dim", [1, 20, 32, 80, 96, 100, 112, 128, 160, 192, 224, 256, 512])
def test_head_sizes(dim, layout):
    check(attention_case([5], [37], heads=2, kv_heads=1, dim=dim, layout=layout))


@needs_native
@pytest.mark.parametrize("seed", range(8))
def test_batches_of_different_shapes(seed):
    rng = torch.Generator().manual_seed(seed)
    count = seed + 1
    rows = torch.randint(1, 65, (count,), generator=rng).tolist()
    prefixes = torch.randint(0, 200, (count,), generator=rng).tolist()
    check(attention_case(rows, prefixes, heads=6, kv_heads=2, seed=seed))


@needs_native
@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129])
def test_prefix_lengths(prefix):
    check(attention_case([4], [prefix], seed=prefix))


@needs_native
def test_trees_of_only_a_root_and_full_trees():
    check(attention_case([1, 64, 1], [5, 20, 0]))
    check(attention_case([64], [0], chain=True))


@needs_native
@pytest.mark.parametrize("rows", [16, 17, 31, 33, 48, 63])
def test_trees_around_the_edges_of_a_group(rows):
    check(attention_case([rows, rows], [rows, 0], heads=3, kv_heads=1, seed=rows))
    check(attention_case([rows], [5], chain=True, seed=rows))


@needs_native
def test_drafting_needs_no_cache():
    case = attention_case([9, 4], [0, 0], last_queries=2)
    want = case.run()
    no_blocks = torch.empty(0, 2, 16, 64)
    case.arguments.update(key_cache=no_blocks, value_cache=no_blocks, block_table=torch.empty(2, 0, dtype=torch.int32))
    torch.testing.assert_close(case.run(), want, atol=0, rtol=0)


@needs_native
@pytest.mark.parametrize("last", [1, 3])
def test_only_the_newest_level_queries(last):
    check(attention_case([9, 1, 6], [30, 2, 0], last_queries=last))


@needs_native
def test_a_cut_tree_is_the_prefix_of_the_whole():
    whole = attention_case([10], [40])
    cut = AttentionCase(dict(whole.arguments), whole.tree, whole.keys, whole.values)
    for name in ("query", "tree_key", "tree_value", "ancestors"):
        cut.arguments[name] = whole.arguments[name][:6]
    cut.arguments["query_start"] = cut.arguments["key_start"] = torch.tensor([0, 6], dtype=torch.int32)
    torch.testing.assert_close(cut.run(), whole.run()[:6], atol=0, rtol=0)


@needs_native
def test_a_row_without_visible_keys_is_zero_and_foreign_bits_are_ignored():
    case = attention_case([3], [0])
    case.arguments["ancestors"] = torch.tensor([0, 0b111000, 0b1000001], dtype=torch.int64)
    out = case.run()
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    only = case.arguments["tree_value"][0].repeat_interleave(2, dim=0)
    torch.testing.assert_close(out[2], only)


@needs_native
def test_large_scores_do_not_overflow():
    case = attention_case([6], [70])
    case.arguments["query"] = case.arguments["query"] * 300
    check(case, tolerance=1e-3)  # scores near 1000 carry an absolute error of that size


@needs_native
def test_rows_beyond_the_batch_stay_untouched():
    case = attention_case([4], [10])
    query = case.arguments["query"]
    case.arguments["query"] = torch.cat([query, query])
    case.arguments["ancestors"] = case.arguments["ancestors"].repeat(2)
    out = case.run(poison=7.0)
    assert torch.all(out[4:] == 7.0)
    assert not torch.any(out[:4] == 7.0)


@needs_native
def test_the_result_does_not_depend_on_the_threads():
    case = attention_case([33, 5], [300, 77], heads=9, kv_heads=3)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            results.append(case.run())
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def _bad(**changes):
    return changes


@needs_native
@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("query must be contiguous in its last", lambda a: {"query": a["query"].mT.contiguous().mT}),
        ("tree_key must be float32", lambda a: {"tree_key": a["tree_key"].half()}),
        ("tree_value must have size", lambda a: {"tree_value": a["tree_value"][:-1]}),
        ("multiple of", lambda a: {"query": a["query"][:, :3]}),
        ("ancestors must be int64", lambda a: {"ancestors": a["ancestors"].int()}),
        ("block_table must be int32", lambda a: {"block_table": a["block_table"].long()}),
        ("does not fit its", lambda a: {"prefix_lens": a["prefix_lens"] + 1000}),
        ("the cache has", lambda a: {"block_table": a["block_table"] + 1000}),
        ("the cache has", lambda a: {"block_table": a["block_table"] - 1000}),
        ("past the", lambda a: {"query_start": a["query_start"] + 1}),
        ("falls at request", lambda a: {"key_start": a["key_start"].flip(0).contiguous()}),
        ("query_start must be contiguous", lambda a: {"query_start": a["query_start"][:1].expand(3)}),
        ("must have 4 dimensions", lambda a: {"key_cache": a["key_cache"][0]}),
        ("query must be float32, bfloat16 or float16", lambda a: {
            k: v.double() for k, v in a.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(message, change):
    case = attention_case([4, 2], [10, 3])
    case.arguments.update(change(case.arguments))
    with pytest.raises(RuntimeError, match=message):
        case.run()


@needs_native
def test_an_expanded_output_is_refused():
    case = attention_case([4], [10])
    out = torch.zeros(1, 4, 64).expand(4, 4, 64)
    with pytest.raises(RuntimeError, match="must not be expanded"):
        ops.tree_attention(**case.arguments, out=out)


@needs_native
def test_strided_output():
    case = attention_case([4, 3], [10, 0])
    wide = torch.full((7, 6, 64), math.nan)
    ops.tree_attention(**case.arguments, out=wide[:, 1:5])
    assert torch.equal(wide[:, 1:5], case.run())
    assert wide[:, [0, 5]].isnan().all()
