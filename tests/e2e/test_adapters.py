"""LoRA adapters on the target: their texts are those of plain decoding with them; the head is not adapted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e import tiny
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts
from tests.e2e.oracle import hiding, runner_of
from tests.e2e.test_overrides import drafted_trees

TOKENS, RANK = 40, 8
QUERY, KEY = tiny.HEADS * tiny.HEAD_SIZE, tiny.KV_HEADS * tiny.HEAD_SIZE
MODULES = {
    "self_attn.q_proj": (tiny.HIDDEN, QUERY),
    "self_attn.k_proj": (tiny.HIDDEN, KEY),
    "self_attn.v_proj": (tiny.HIDDEN, KEY),
    "self_attn.o_proj": (QUERY, tiny.HIDDEN),
    "mlp.gate_proj": (tiny.HIDDEN, tiny.INTERMEDIATE),
    "mlp.up_proj": (tiny.HIDDEN, tiny.INTERMEDIATE),
    "mlp.down_proj": (tiny.INTERMEDIATE, tiny.HIDDEN),
}
OUTER = {"embed_tokens": ("model.embed_tokens", "embedding"), "lm_head": ("lm_head", "lora")}

# vLLM's CPU build gives a request without an adapter what is in the last place for adapters: it has to be free.
ROOM = {"enable_lora": True, "max_loras": 4, "max_lora_rank": RANK}


def make_adapter(path: Path, seed: int, *, outer: bool = False) -> Path:
    """Write a random adapter of every linear layer, and of embedding and output if ``outer``."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    state = {}
    for layer in range(tiny.LAYERS):
        for name, (inputs, outputs) in MODULES.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            state[f"{prefix}.lora_A.weight"] = weight(RANK, inputs)
            state[f"{prefix}.lora_B.weight"] = weight(outputs, RANK)
    targets = [name.rpartition(".")[2] for name in MODULES]
    if outer:
        state["base_model.model.model.embed_tokens.lora_embedding_A"] = weight(RANK, tiny.VOCABULARY)
        state["base_model.model.model.embed_tokens.lora_embedding_B"] = weight(tiny.HIDDEN, RANK)
        state["base_model.model.lm_head.lora_A.weight"] = weight(RANK, tiny.HIDDEN)
        state["base_model.model.lm_head.lora_B.weight"] = weight(tiny.VOCABULARY, RANK)
        targets += ["embed_tokens", "lm_head"]
    path.mkdir()
    save_file(state, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}))
    return path


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """None, two adapters of the inner layers, and one of all layers."""
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("adapters")
    paths = [make_adapter(folder / str(n), seed=n, outer=n == 3) for n in (1, 2, 3)]
    return [None, *(LoRARequest(path.name, n, str(path)) for n, path in enumerate(paths, start=1))]


@pytest.fixture(scope="module")
def plain_adapted(make_llm: Callable[..., Any]) -> Any:
    return make_llm(**ROOM)


@pytest.fixture(scope="module")
def adapted_trees(make_llm: Callable[..., Any], tiny_head: Path) -> Any:
    return make_llm(speculative_config=adaptivespec(tiny_head), **ROOM)


def decode(llm: Any, prompts: list, adapters: list[Any], params: Any) -> list[Any]:
    outputs = llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def hidden(prompts: list, outputs: list[Any]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p["prompt_token_ids"]): [*o.token_ids, *[5] * TOKENS] for p, o in zip(prompts, outputs, strict=True)}


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5},
    "penalty and log-probabilities": {"repetition_penalty": 1.2, "logprobs": 2},
}


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_batch_of_mixed_adapters(plain_adapted: Any, adapted_trees: Any, adapters: list[Any], sampling: str) -> None:
    prompts = random_prompts(8, seed=601)
    chosen = adapters * 2
    params = greedy(TOKENS, **SAMPLING[sampling])
    alone = [decode(plain_adapted, [p], [a], params)[0] for p, a in zip(prompts, chosen, strict=True)]
    with hiding(adapted_trees, hidden(prompts, alone)) as stats:
        ours = decode(adapted_trees, prompts, chosen, params)
    assert tokens_of(ours) == tokens_of(alone)
    for mine, theirs in zip(ours, alone, strict=True):
        for a, b in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
            assert {t: p.logprob for t, p in a.items()} == pytest.approx({t: p.logprob for t, p in b.items()}, abs=1e-4)
    assert stats["accepted"] > 60
    assert tokens_of(decode(adapted_trees, prompts, chosen, params)) == tokens_of(alone)


def test_every_adapter_has_an_effect(plain_adapted: Any, adapters: list[Any]) -> None:
    """Or the comparison would hold without them."""
    (prompt,) = random_prompts(1, seed=602)
    texts = {tuple(decode(plain_adapted, [prompt], [adapter], greedy(TOKENS))[0].token_ids) for adapter in adapters}
    assert len(texts) == len(adapters)


def test_the_head_is_not_adapted(trees: Any, adapted_trees: Any, adapters: list[Any]) -> None:
    """A request without an adapter drafts what it does on an engine that knows none, whatever its batch has."""
    prompts = random_prompts(4, seed=605)
    with drafted_trees(trees) as expected:
        generate(trees, prompts, greedy(TOKENS))
    with drafted_trees(adapted_trees) as ours:
        decode(adapted_trees, prompts, [None, adapters[3], adapters[1], None], greedy(TOKENS))
    before, after = ([[tree.tokens for tree in drafted] for drafted in d.values()] for d in (expected, ours))
    assert (after[0], after[3]) == (before[0], before[3])
    assert sum(map(len, after[1])) > TOKENS, "adapted requests draft too"
    assert runner_of(adapted_trees).faults.count == 0


def test_equal_prompts_of_different_adapters_share_no_cache(
    plain_adapted: Any, adapted_trees: Any, adapters: list[Any]
) -> None:
    prompts = random_prompts(1, seed=603, shortest=90, longest=90) * 4
    for _ in range(2):  # the second time from the prefix cache
        expected, ours = (
            tokens_of(decode(llm, prompts, adapters, greedy(TOKENS))) for llm in (plain_adapted, adapted_trees)
        )
        assert ours == expected
        assert len({tuple(tokens) for tokens in ours}) == 4


def test_costs_are_measured_and_nothing_is_drafted_at_times(
    make_llm: Callable[..., Any], tiny_head: Path, plain_adapted: Any, adapters: list[Any]
) -> None:
    """The default policy, whose trees come and go, beside its own measurements at start."""
    llm = make_llm(speculative_config={"method": "adaptivespec", "model": str(tiny_head)}, **ROOM)
    prompts = random_prompts(8, seed=604)
    params = [greedy(5 * n) for n in range(1, 9)]
    chosen = adapters * 2
    alone = [decode(plain_adapted, [p], [a], [s])[0] for p, a, s in zip(prompts, chosen, params, strict=True)]
    assert tokens_of(decode(llm, prompts, chosen, params)) == tokens_of(alone)
