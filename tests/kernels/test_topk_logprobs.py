"""topk_logprobs against log_softmax and a stable sort."""

from __future__ import annotations

import pytest
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import reference

pytestmark = pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")


def check(logits: torch.Tensor, k: int) -> None:
    values, indices = ops.topk_logprobs(logits, k)
    want_values, want_indices = reference.topk_logprobs(logits.double(), k)
    assert (values.dtype, indices.dtype) == (torch.float32, torch.int64)
    assert torch.equal(indices, want_indices)
    torch.testing.assert_close(values.double(), want_values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [64, 65, 511, 1024, 1025, 4096, 16384, 16385, 49152, 151936])
def test_equals_the_reference(vocab, dtype):
    rng = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(3, vocab, generator=rng) * 4).to(dtype)
    for k in (1, 10, 64):
        check(logits, k)


@pytest.mark.parametrize("vocab", [1, 2, 7, 16, 33])
def test_tiny_rows(vocab):
    check(torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab)), min(vocab, 5))


@pytest.mark.parametrize("seed", range(5))
def test_ties_take_the_lower_index(seed):
    rng = torch.Generator().manual_seed(seed)
    check(torch.randint(0, 3, (4, 40000), generator=rng).float(), 20)


def test_rising_rows_replace_every_candidate():
    check(torch.arange(20000.0).repeat(2, 1) * 1e-3, 64)


def test_large_offsets_and_masked_tokens():
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)) + 3e4
    logits[:, 100:4000] = -torch.inf
    values, indices = ops.topk_logprobs(logits, 8)
    want = (logits.double()).log_softmax(-1)
    torch.testing.assert_close(values.double(), want.gather(-1, indices), atol=1e-5, rtol=1e-5)
    assert not ((indices >= 100) & (indices < 4000)).any()


def test_masked_tokens_fill_up_in_order():
    logits = torch.full((1, 4000), -torch.inf)
    logits[0, 3000] = 2.0
    values, indices = ops.topk_logprobs(logits, 3)
    assert indices.tolist() == [[3000, 0, 1]]
    assert values.tolist() == [[0.0, -torch.inf, -torch.inf]]


def test_nan_and_all_masked_rows_have_no_distribution():
    logits = torch.zeros(2, 3000)
    logits[0, 2000] = torch.nan
    logits[1] = -torch.inf
    values, indices = ops.topk_logprobs(logits, 4)
    assert values.isnan().all()
    assert indices[0, 0] == 2000


def test_strided_rows():
    wide = torch.randn(4, 9000, generator=torch.Generator().manual_seed(1))
    check(wide[::2, 500:8500], 10)


def test_the_result_does_not_depend_on_the_threads():
    logits = torch.randn(2, 100000, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(ops.topk_logprobs(logits, 16)[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_no_rows():
    values, indices = ops.topk_logprobs(torch.empty(0, 100), 3)
    assert values.shape == indices.shape == (0, 3)


@pytest.mark.parametrize("k", [0, 65, 11])
def test_k_out_of_range(k):
    with pytest.raises(RuntimeError, match="k must be in"):
        ops.topk_logprobs(torch.zeros(1, 10 if k == 11 else 100), k)


def test_bad_arguments_are_refused():
    with pytest.raises(RuntimeError, match="contiguous in its last dimension"):
        ops.topk_logprobs(torch.zeros(10, 1).expand(10, 50), 2)
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
        ops.topk_logprobs(torch.zeros(2, 50, dtype=torch.float64), 2)
