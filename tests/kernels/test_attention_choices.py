"""Implementations of tree attention that are joined from two parts, with stand-ins for kernels that a CPU lacks."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from adaptivespec_vllm.attention import AttentionUnavailable, PagedKV, choose
from adaptivespec_vllm.attention.merge import merge_by_lse
from adaptivespec_vllm.ops import reference

from .cases import attention_case, in_float64, places_of

CASES = [
    dict(rows=[9, 1, 5], prefixes=[70, 3, 0]),
    dict(rows=[1, 64], prefixes=[0, 130], heads=6, kv_heads=3),
    dict(rows=[4, 4], prefixes=[0, 0]),
    dict(rows=[17], prefixes=[65], heads=8, kv_heads=1, last_queries=4),
]
SETTINGS = {"block_size": 64, "layout": "packed"}


def case_of(number: int):
    return attention_case(**CASES[number], **SETTINGS, seed=number)


def prefix_in_torch(query, cache, places, scale):
    """What FlashAttention gives: rows without a key have an infinite sum and an output of anything."""
    out = torch.full_like(query, math.nan)
    lse = torch.full((query.shape[1], query.shape[0]), math.inf)
    group = query.shape[1] // cache.key.shape[1]
    first = 0
    for request, (rows, prefix) in enumerate(zip(places.queries, places.prefixes, strict=True)):
        if prefix:
            blocks = places.block_table[request, : -(-prefix // cache.key.shape[2])].long()
            key, value = (
                t[blocks].transpose(1, 2).flatten(0, 1)[:prefix].repeat_interleave(group, 1).float()
                for t in (cache.key, cache.value)
            )
            scores = torch.einsum("qhd,khd->hqk", query[first : first + rows].float(), key) * scale
            lse[:, first : first + rows] = scores.logsumexp(-1)
            out[first : first + rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        first += rows
    return out, lse


def run(attention, case):
    arguments = case.arguments
    out = torch.full_like(arguments["query"], math.nan)
    attention(
        arguments["query"], arguments["tree_key"], arguments["tree_value"],
        PagedKV(arguments["key_cache"], arguments["value_cache"]), places_of(case.arguments), arguments["scale"], out,
    )  # fmt: skip
    return out


def check(attention, number, tolerance=1e-5):
    case = case_of(number)
    want = in_float64(case).run(reference.tree_attention)
    torch.testing.assert_close(run(attention, case).double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_op_behind_the_contract(number):
    check(choose("auto", "cpu")[1], number)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_prefix_and_tree_joined(number):
    name, attention = choose("flash", "cuda", prefix=prefix_in_torch)
    assert name == "flash"
    check(attention, number)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_prefix_and_tree_joined_by_vllm(number):
    joined = pytest.importorskip("vllm.v1.attention.ops.merge_attn_states")

    def prefix(*args):  # its kernels leave such rows out; its torch version multiplies them by nothing
        out, lse = prefix_in_torch(*args)
        return out.nan_to_num(), lse

    check(choose("flash", "cuda", prefix=prefix, merge=joined.merge_attn_states)[1], number)


def test_joining_where_one_part_saw_nothing():
    part, junk, out = torch.ones(2, 1, 4), torch.full((2, 1, 4), math.nan), torch.full((2, 1, 4), math.nan)
    empty, some = torch.tensor([[math.inf, -math.inf]]), torch.zeros(1, 2)
    merge_by_lse(out, junk, empty, part, some)
    assert (out == 1).all()
    merge_by_lse(out, part, some, junk, empty)
    assert (out == 1).all()
    merge_by_lse(out, junk, empty, junk, empty)
    assert (out == 0).all()


class FakeBias:
    """The part of xFormers' paged bias that is used."""

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen, block_tables, page_size, *, device=None):
        assert block_tables.shape == (len(q_seqlen), block_tables.shape[1])
        bias = cls()
        bias.queries, bias.prefixes, bias.table, bias.page = q_seqlen, kv_seqlen, block_tables, page_size
        return bias


def partial_in_torch(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """[1, R, G, H, D] with [1, K, G, H, D]; the sums are [1, G, H, R]."""
    assert query.ndim == key.ndim == value.ndim == 5
    assert query.shape[2:] == key.shape[2:]
    scores = torch.einsum("bqghd,bkghd->bghqk", query.float(), key.float()) * scale
    if isinstance(attn_bias, FakeBias):
        mask = torch.full(scores.shape[-2:], -math.inf)
        first = 0
        for request, (rows, prefix) in enumerate(zip(attn_bias.queries, attn_bias.prefixes, strict=True)):
            tokens = torch.arange(prefix)
            at = attn_bias.table[request][tokens // attn_bias.page].long() * attn_bias.page + tokens % attn_bias.page
            mask[first : first + rows, at] = 0
            first += rows
        scores = scores + mask
    else:
        assert attn_bias.shape == scores.shape
        assert attn_bias.stride(-2) % 8 == 0
        scores = scores + attn_bias.float()
    weights = scores.softmax(-1).nan_to_num()
    values = value.float().nan_to_num()  # unused slots of the cache are poisoned
    return torch.einsum("bghqk,bkghd->bqghd", weights, values).to(query.dtype), scores.logsumexp(-1)


def merge_in_torch(attn_split, lse_split, write_lse=True, output_dtype=None):
    weights = torch.stack(lse_split).softmax(0).permute(0, 1, 4, 2, 3)[..., None]
    return (torch.stack(attn_split).float() * weights).sum(0).to(output_dtype), None


@pytest.fixture
def xformers(monkeypatch):
    fmha = SimpleNamespace(
        memory_efficient_attention_partial=partial_in_torch,
        merge_attentions=merge_in_torch,
        attn_bias=SimpleNamespace(PagedBlockDiagonalPaddedKeysMask=FakeBias),
    )
    package, inner = ModuleType("xformers"), ModuleType("xformers.ops")
    package.__version__, inner.fmha = "0.0.1", fmha
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", inner)
    return fmha


def xformers_attention():
    from adaptivespec_vllm.attention.xformers_partial import XformersTreeAttention

    return XformersTreeAttention(torch.device("cpu"))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_xformers_by_its_interface(xformers, number):
    """Layouts, masks and the merge; its kernels need a GPU."""
    case = case_of(number)
    arguments = case.arguments
    arguments["query"] = arguments["query"].contiguous()
    for name in ("key_cache", "value_cache"):
        arguments[name].nan_to_num_()
    want = in_float64(case).run(reference.tree_attention)
    torch.testing.assert_close(run(xformers_attention(), case).double(), want, atol=1e-5, rtol=1e-5)


def test_xformers_refusals(xformers, monkeypatch):
    attention = xformers_attention()
    with pytest.raises(AttentionUnavailable, match="block_size 16; allowed with it: a multiple of 64"):
        run(attention, attention_case([2], [5], block_size=16, layout="packed"))
    with pytest.raises(AttentionUnavailable, match="not token-major"):
        run(attention, attention_case([2], [5], block_size=64, layout="token_major", kv_heads=2))
    with monkeypatch.context() as patch:
        patch.setattr(xformers, "memory_efficient_attention_partial", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(AttentionUnavailable, match=r"fails here at a small case .ZeroDivisionError"):
            xformers_attention()
    with monkeypatch.context() as patch:
        patch.setattr(xformers, "merge_attentions", lambda a, *args, **kwargs: (a[0], None))
        with pytest.raises(AttentionUnavailable, match="other numbers than the reference"):
            xformers_attention()
    monkeypatch.delattr(xformers, "merge_attentions")
    with pytest.raises(AttentionUnavailable, match=r"version 0.0.1 has no merge_attentions; install xformers 0.0.35"):
        xformers_attention()


def test_xformers_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    with pytest.raises(AttentionUnavailable, match="got 'xformers', which cannot be imported"):
        choose("xformers", "cuda")


def test_choices():
    assert choose("auto", "cpu")[0] == "our op"
    assert choose("auto", "cuda", prefix=prefix_in_torch)[0] == "flash"
    for name in ("flash", "triton", "xformers"):
        with pytest.raises(AttentionUnavailable, match=f"attention: got '{name}'; allowed on CPU: 'auto'"):
            choose(name, "cpu")
    with pytest.raises(AttentionUnavailable, match="got 'flash'; vLLM does not run FlashAttention"):
        choose("flash", "cuda")
    with pytest.raises(AttentionUnavailable, match="got 'cutlass'; allowed on CUDA: 'auto', 'flash', 'triton'"):
        choose("cutlass", "cuda")
    with pytest.raises(AttentionUnavailable, match="allowed on TPU: none"):
        choose("auto", "tpu")
