"""The Triton kernel of tree attention under Triton's interpreter, which has to be asked for before Triton is imported:
one test here runs the others in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from adaptivespec_vllm.attention import PagedKV
from adaptivespec_vllm.attention.triton_paged import TritonTreeAttention, splits_for
from adaptivespec_vllm.ops import reference

from .cases import attention_case, in_float64, places_of, randint

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest error of an output row, relative to its length."""

CASES = 210

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_the_kernel_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{CASES} random cases" in done.stdout


def pick(choices, rng):
    return choices[randint(0, len(choices), rng)]


def random_case(seed):
    """A batch of awkward sizes, the kernel's own choices among them."""
    rng = torch.Generator().manual_seed(seed)
    kv_heads, count = pick((1, 1, 2, 3), rng), pick((1, 1, 1, 2, 3), rng)
    group = pick((1, 2, 3, 4, 7, 8), rng)
    case = attention_case(
        [pick((1, 2, 5, 7, 8) if group > 3 else (1, 8, 16, 17, 33, 64), rng) for _ in range(count)],
        [pick((0, 1, 15, 16, 17, 63, 64, 65, 129, 193), rng) for _ in range(count)],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=pick((64, 80, 96, 128, 256), rng),
        block_size=pick((16, 32, 64, 128), rng),
        dtype=pick((torch.float32, torch.bfloat16, torch.bfloat16, torch.float16), rng),
        layout=pick(("packed", "packed", "token_major", "transposed_keys", "strided"), rng),
        seed=seed,
        last_queries=pick((None, None, 1, 4), rng),
    )
    return case, pick((1, 1, 2, 3, 5), rng), bool(randint(0, 3, rng) == 0)


def run(case, splits, cache=None):
    arguments = case.arguments
    query = arguments["query"]
    cache = cache or PagedKV(arguments["key_cache"], arguments["value_cache"])
    out, lse = torch.full_like(query, torch.nan), torch.full((query.shape[1], query.shape[0]), torch.nan)
    TritonTreeAttention(splits).with_lse(
        query, arguments["tree_key"], arguments["tree_value"], cache, places_of(arguments), arguments["scale"], out, lse
    )  # fmt: skip
    return out, lse


def error(got, want):
    """Of the worst output row; rows that see nothing must be zeros."""
    lengths = want.norm(dim=-1)
    difference = (got.double() - want).norm(dim=-1)
    assert (difference[lengths == 0] == 0).all()
    return float((difference / lengths.clamp(min=1e-30)).max())


def quantized(case, key_scale, value_scale):
    """The case with its cache in fp8: what the kernel is given, and the same numbers for the reference."""
    arguments = case.arguments
    stored = [
        (arguments[name].float() / scale).to(torch.float8_e4m3fn)
        for name, scale in (("key_cache", key_scale), ("value_cache", value_scale))
    ]
    cache = PagedKV(*stored, torch.tensor([key_scale]), torch.tensor([value_scale]))
    exact = in_float64(case)
    exact.arguments |= {"key_cache": stored[0].double() * key_scale, "value_cache": stored[1].double() * value_scale}
    return cache, exact


@interpreted
def test_random_cases():
    worst = dict.fromkeys(TOLERANCE, 0.0)
    for seed in range(CASES):
        case, splits, in_fp8 = random_case(seed)
        cache, exact = quantized(case, 0.25, 0.5) if in_fp8 else (None, in_float64(case))
        out, _ = run(case, splits, cache)
        off = error(out, exact.run(reference.tree_attention))
        assert off <= TOLERANCE[out.dtype], f"case {seed}: {off}"
        worst[out.dtype] = max(worst[out.dtype], off)
    print(f"{CASES} random cases, worst error by dtype: {worst}")


@interpreted
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_log_sum_exps(splits):
    """Of prefix and tree: joined with those of another part of the keys they give the whole."""
    case = in_float64(attention_case([5, 9], [70, 0]))
    _, lse = run(attention_case([5, 9], [70, 0]), splits)
    arguments, group = case.arguments, 2
    for request, keys in enumerate(case.keys):
        first, last = arguments["query_start"][request : request + 2].tolist()
        rows = slice(first, last)
        every = torch.cat([keys, arguments["tree_key"][rows]]).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", arguments["query"][rows], every) * arguments["scale"]
        columns = torch.arange(last - first)
        seen = torch.cat(
            [torch.ones(last - first, len(keys)).bool(), (arguments["ancestors"][rows, None] >> columns & 1).bool()], 1
        )
        want = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(lse[:, rows].double(), want, atol=1e-4, rtol=1e-4)


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_that_sees_nothing(splits):
    case = attention_case([3], [0])
    case.arguments["ancestors"] = torch.tensor([0b1, 0, 0b101])
    out, lse = run(case, splits)
    assert (out[1] == 0).all()
    assert (lse[:, 1] == -torch.inf).all()
    assert out[[0, 2]].isfinite().all()


@interpreted
def test_the_last_bit_of_a_word():
    case = attention_case([64], [3], chain=True)
    assert (case.arguments["ancestors"] < 0).any()
    assert error(run(case, 1)[0], in_float64(case).run(reference.tree_attention)) < 1e-5


def test_what_it_does_not_take():
    case = attention_case([3], [5])
    with pytest.raises(ValueError, match="needs its scales"):
        run(case, 1, PagedKV(*(case.arguments[n].to(torch.float8_e4m3fn) for n in ("key_cache", "value_cache"))))
    with pytest.raises(ValueError, match="do not divide"):
        run(replace(case, arguments=case.arguments | {"query": case.arguments["query"][:, :3]}), 1)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        run(
            replace(
                case, arguments=case.arguments | {"query": case.arguments["query"].expand(3, 4, 64).mT.mT[..., ::2]}
            ),
            1,
        )


def test_long_prefixes_of_few_programs_are_split():
    assert splits_for([4096], 8, 132) == 8
    assert splits_for([100_000], 8, 132) == 16
    assert splits_for([4096] * 64, 64 * 8, 132) == 1
    assert splits_for([100], 1, 132) == 1
    assert splits_for([], 1, 132) == 1
