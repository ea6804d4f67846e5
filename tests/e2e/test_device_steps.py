"""The steps of the CUDA runner on real numbers: the same code, on a CPU's tensors, in vLLM's CPU runner.

What it cannot show here are kernels and graphs; what it shows is that drafting ahead, verification by one copy and the
head's levels under vLLM's forward context give right texts and the trees of a live head.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, truth_of
from tests.e2e.oracle import hiding, runner_of

TOKENS = 40


@pytest.fixture(scope="module")
def waits() -> list[int]:
    """Copies to the host, by step."""
    return []


@pytest.fixture(scope="module")
def make_device(make_llm: Callable[..., Any], tiny_head: Path, waits: list[int]) -> Callable[..., Any]:
    """Engines whose runner works as the CUDA one does."""
    from adaptivespec_vllm.engine.v1 import cpu_worker, cuda_proposer, device_steps, transfer

    class Runner(device_steps.DeviceSteps, cpu_worker.CPUTreeModelRunner):
        def execute_model(self, *args: Any, **kwargs: Any) -> Any:
            waits.append(0)
            return super().execute_model(*args, **kwargs)

    def counted(*tensors: Any) -> Any:
        if waits:
            waits[-1] += 1
        return transfer.to_host(*tensors)

    def make(**settings: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_worker, "CPUTreeModelRunner", Runner)
            return make_llm(**({"speculative_config": adaptivespec(tiny_head)} | settings))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_proposer, "to_host", counted)
        patch.setattr(device_steps, "to_host", counted)
        yield make


@pytest.fixture(scope="module")
def device(make_device: Callable[..., Any]) -> Any:
    return make_device()


@pytest.fixture(scope="module")
def prompts() -> list:
    return random_prompts(8)


@pytest.fixture(scope="module")
def expected(plain: Any, prompts: list) -> list[list[int]]:
    return generate(plain, prompts, greedy(TOKENS))


@pytest.mark.parametrize("batch", [1, 8])
def test_hidden_truths(device: Any, prompts: list, expected: list, batch: int) -> None:
    for first in range(0, len(prompts), batch):
        chosen = slice(first, first + batch)
        with hiding(device, truth_of(prompts, expected)) as stats:
            tokens = generate(device, prompts[chosen], greedy(TOKENS))
        assert tokens == expected[chosen]
        assert stats["accepted"] > batch


def test_two_waits_a_step(device: Any, prompts: list, waits: list[int]) -> None:
    waits.clear()
    generate(device, prompts, greedy(TOKENS))
    assert max(waits) == 2
    assert runner_of(device).faults.count == 0


def test_trees_are_those_of_a_live_head(
    device: Any, trees: Any, prompts: list, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A static policy wants the most likely nodes, which are those that were drafted ahead."""
    drafted: list[dict] = []
    for llm in (trees, device):
        llm.reset_prefix_cache()
        seen: dict = {}
        runner = runner_of(llm)
        stock = runner.keep_trees

        def keep(kept: Any, runner: Any = runner, stock: Any = stock, seen: dict = seen) -> Any:
            for request, tree in zip(runner.input_batch.req_ids, kept, strict=True):
                prompt = tuple(runner.requests[request].prompt_token_ids)
                seen[prompt, tree.root_position] = (tree.tokens, tree.parents)
            return stock(kept)

        monkeypatch.setattr(runner, "keep_trees", keep)
        assert generate(llm, prompts, greedy(TOKENS)) == expected
        monkeypatch.undo()
        drafted.append(seen)
    live, ahead = drafted
    same = [live[at] == ahead[at] for at in live.keys() & ahead.keys()]
    assert len(same) > 100
    assert sum(same) / len(same) > 0.9  # packed weights round otherwise: near-ties may fall the other way


def test_margin_and_grammar_free_sampling(
    device: Any, make_device: Callable[..., Any], tiny_head: Path, prompts: list
) -> None:
    """A margin's limits go to the device too; a seeded request draws the noise of plain decoding."""
    lossy = make_device(speculative_config=adaptivespec(tiny_head, margin={"kappa": 0.05}))
    generate(lossy, prompts, greedy(TOKENS))
    assert lossy.collective_rpc("adaptivespec_stats")[0]["promotions"] > 0


def test_log_probabilities(device: Any, plain: Any, prompts: list, expected: list) -> None:
    wanted = plain.generate(prompts[:3], greedy(12, logprobs=2), use_tqdm=False)
    with hiding(device, truth_of(prompts, expected)):
        got = device.generate(prompts[:3], greedy(12, logprobs=2), use_tqdm=False)
    for one, other in zip(wanted, got, strict=True):
        for here, there in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert here.keys() == there.keys()
            assert all(abs(here[token].logprob - there[token].logprob) < 1e-3 for token in here)


def test_prefills_beside_trees_and_putting_off(make_device: Callable[..., Any], tiny_head: Path, plain: Any) -> None:
    prompts = random_prompts(8, seed=5, shortest=30, longest=90)
    expected = generate(plain, prompts, greedy(TOKENS))
    llm = make_device(
        speculative_config=adaptivespec(tiny_head, tree={}), max_num_batched_tokens=40, enable_chunked_prefill=True
    )
    assert generate(llm, prompts, greedy(TOKENS)) == expected
    with hiding(llm, truth_of(prompts, expected)) as stats:
        llm.reset_prefix_cache()
        assert generate(llm, prompts, greedy(TOKENS)) == expected
    assert stats["accepted"] > len(prompts)
    assert runner_of(llm).faults.count == 0
