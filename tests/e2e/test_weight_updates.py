"""Weights that change while the engine lives: of the target by vLLM's reload, of the head by its weight transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e import tiny
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, truth_of
from tests.e2e.oracle import decode_with_oracle, runner_of
from tests.e2e.test_putting_off import watched

TOKENS = 40


def changed(directory: Path, seed: int) -> Path:
    """Another model of the same structure, whose weights bfloat16 can hold (so that a head is packed)."""
    generator = torch.Generator().manual_seed(seed)
    state = load_file(directory / "model.safetensors")
    for name, value in state.items():
        if value.is_floating_point():
            noise = 0.3 * value.std() * torch.randn(value.shape, generator=generator) if value.dim() > 1 else 0
            state[name] = (value + noise).bfloat16().float()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def file_transfer() -> str:
    """vLLM's transfer with files in the place of a trainer; the way through the worker is vLLM's own."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class Nothing:
        pass

    @dataclass
    class FromFile:
        path: str

    class FileEngine(WeightTransferEngine):
        init_info_cls, update_info_cls = Nothing, FromFile

        def init_transfer_engine(self, init_info: Nothing) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: FromFile) -> None:
            self.model.load_weights(load_file(update_info.path).items())

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine("file", FileEngine)
    return "file"


def test_reloaded_target(make_llm: Callable[..., Any], tiny_head: Path, tmp_path: Path) -> None:
    """Trees decode what a plain engine with the new weights does; the head goes on with its shared embeddings."""
    other = changed(tiny.make_target(tmp_path / "other"), seed=1)
    prompts = random_prompts(4, seed=601)
    llm = make_llm(speculative_config=adaptivespec(tiny_head))
    before = generate(llm, prompts, greedy(TOKENS))
    expected = generate(make_llm(other), prompts, greedy(TOKENS))
    assert before != expected
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    llm.reset_prefix_cache()
    assert generate(llm, prompts, greedy(TOKENS)) == expected
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, expected), greedy(TOKENS))
    assert tokens == expected
    assert stats["accepted"] > TOKENS


def test_updated_head(make_llm: Callable[..., Any], tmp_path: Path, file_transfer: str) -> None:
    """It drafts as an engine does that was started with the new head, on packed weights too."""
    first = changed(tiny.make_head(tmp_path / "first"), seed=2)
    second = changed(tiny.make_head(tmp_path / "second"), seed=3)
    prompts = random_prompts(3, seed=602)
    llm = make_llm(speculative_config=adaptivespec(first), weight_transfer_config={"backend": file_transfer})
    fresh = make_llm(speculative_config=adaptivespec(second))

    def drafts(engine: Any) -> dict:
        engine.reset_prefix_cache()
        with watched(engine, 1) as seen:
            generate(engine, prompts, greedy(TOKENS))
        return seen

    assert runner_of(llm).drafter.head.is_packed
    before, wanted = drafts(llm), drafts(fresh)
    llm.start_draft_weight_update()
    llm.update_weights({"update_info": {"path": str(second / "model.safetensors")}})
    llm.finish_weight_update()
    after = drafts(llm)
    assert runner_of(llm).drafter.head.is_packed
    both = after.keys() & wanted.keys()
    assert len(both) > TOKENS
    assert sum(after[place] == wanted[place] for place in both) >= 0.98 * len(both)  # near-ties of a random head
    assert sum(before[place] == wanted[place] for place in before.keys() & wanted.keys()) < 0.2 * len(before)


def test_sleep_is_vllms_own_on_a_cpu(trees: Any) -> None:
    """Its CPU worker has none; a request for it changes nothing."""
    prompts = random_prompts(2, seed=603)
    before = generate(trees, prompts, greedy(TOKENS))
    trees.sleep(level=1)
    trees.wake_up()
    assert generate(trees, prompts, greedy(TOKENS)) == before
