"""A quantized target and a head that is not: each loads by its own configuration, and the text is the target's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e import tiny
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, truth_of
from tests.e2e.oracle import decode_with_oracle, runner_of

TOKENS = 40
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


@pytest.fixture(scope="module")
def quantized_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with linear layers of 8 bits."""
    path = tiny.make_target(tmp_path_factory.mktemp("quantized") / "target")
    state = load_file(path / "model.safetensors")
    for name in [name for name in state if name.endswith("_proj.weight")]:
        weight = state[name]
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        state[name] = (weight / scale).round().char()
        state[f"{name}_scale"] = scale
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": INT8}))
    return path


def test_the_text_is_that_of_the_quantized_target(
    make_llm: Callable[..., Any], quantized_target: Path, tiny_head: Path, plain: Any
) -> None:
    prompts = random_prompts(6, seed=801)
    expected = generate(make_llm(quantized_target), prompts, greedy(TOKENS))
    assert expected != generate(plain, prompts, greedy(TOKENS)), "nothing was quantized"
    llm = make_llm(quantized_target, speculative_config=adaptivespec(tiny_head))
    runner = runner_of(llm)
    assert runner.model_config.quantization == "compressed-tensors"
    assert runner.vllm_config.speculative_config.draft_model_config.quantization is None
    tokens, stats = decode_with_oracle(llm, prompts, truth_of(prompts, expected), greedy(TOKENS))
    assert tokens == expected
    assert stats["accepted"] > 50
    llm.collective_rpc("adaptivespec_stats")
    assert generate(llm, prompts, greedy(TOKENS)) == expected
    assert llm.collective_rpc("adaptivespec_stats")[0]["drafted_nodes"] > 100
    assert not runner.faults.count
