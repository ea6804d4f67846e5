"""Settings, targets and layers that cannot be combined with our method: refused by name."""

from __future__ import annotations

import argparse

import pytest
from engine_configs import CPU_ONLY, engine_config
from plugin_models import write_target

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.engine import refusals

pytestmark = [pytest.mark.usefixtures("registered"), CPU_ONLY]

REFUSED = [
    ({"pipeline_parallel_size": 2}, ["pipeline_parallel_size=2"]),
    ({"data_parallel_size": 2}, ["data_parallel_size=2"]),
    ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype='fp8"]),
    ({"kv_cache_dtype": "float16"}, ["kv_cache_dtype='float16"]),
    ({"async_scheduling": True}, ["async_scheduling"]),
    ({"logits_processors": ["a.b:C"]}, ["logits_processors"]),
    ({"worker_cls": "my.Worker"}, ["worker_cls", "my.Worker"]),
    ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, ["kv_connector"]),
]


@pytest.mark.parametrize(("change", "parts"), REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_unsupported_settings_are_refused_by_name(target, options, change, parts):
    if "kv_transfer_config" in change:
        from vllm.config.kv_transfer import KVTransferConfig

        change = {"kv_transfer_config": KVTransferConfig(**change["kv_transfer_config"])}
    with pytest.raises(ConfigError) as error:
        engine_config(target, options, **change)
    assert [part for part in parts if part not in str(error.value)] == []


def test_the_v2_runner_is_refused(target, options, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(refusals.Unsupported, match="VLLM_USE_V2_MODEL_RUNNER"):
        engine_config(target, options)


def test_vllm_would_choose_v1_by_itself(target, options):
    reasons = engine_config(target, options)._get_v2_model_runner_unsupported_features()
    assert "speculative method 'adaptivespec'" in reasons
    assert "speculative method 'adaptivespec'" not in engine_config(target)._get_v2_model_runner_unsupported_features()


TARGETS = [
    ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}, ["sliding_window=64"]),
    (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
        },
        ["layer_types", "sliding_attention"],
    ),
    ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, ["EAGLE-3"]),
    ({"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_heads": 8, "head_dim": 16}, ["attention"]),
]


@pytest.mark.parametrize(("changes", "parts"), TARGETS, ids=[changes["model_type"] for changes, _ in TARGETS])
def test_unsupported_targets_are_refused(tmp_path, options, changes, parts):
    with pytest.raises(ConfigError) as error:
        engine_config(write_target(tmp_path, **changes), options)
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_targets_are_taken(tmp_path, options, architecture):
    kind = architecture[:5].lower()
    target = write_target(tmp_path, architectures=[architecture], model_type=kind)
    assert engine_config(target, options).speculative_config.adaptivespec


class TestLayers:
    """Attention layers as they are built; the worker asks about them after loading."""

    class Impl:
        sliding_window, alibi_slopes, logits_soft_cap, sinks, kv_cache_dtype = -1, None, 0, None, "auto"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("sliding_window", 128),
            ("alibi_slopes", [0.5]),
            ("logits_soft_cap", 30.0),
            ("sinks", object()),
            ("kv_cache_dtype", "fp8"),
            ("kv_cache_dtype", "bfloat16"),
        ],
    )
    def test_each_feature_is_refused_with_its_layer(self, name, value):
        plain, odd = (argparse.Namespace(impl=self.Impl()) for _ in range(2))
        refusals.check_layers({"layers.0": plain}, "torch.float32")
        setattr(odd.impl, name, value)
        with pytest.raises(refusals.Unsupported, match=r"layers\.1"):
            refusals.check_layers({"layers.0": plain, "layers.1": odd}, "torch.float32")
