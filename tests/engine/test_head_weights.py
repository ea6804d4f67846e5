"""The tensors of an EAGLE-3 head: a damaged one is one error that names the tensor, a whole one is taken."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("safetensors")

from plugin_models import HIDDEN, VOCAB, head_tensors, layer_tensors, write_head

from adaptivespec_vllm.engine.head import HeadError, inspect, weights


def shape(*sizes: int) -> np.ndarray:
    return np.zeros(sizes, np.float32)


def renamed(old: str, new: str) -> dict:
    """Changes of the head's tensors that give another prefix to those that have ``old``."""
    held = {name: tensor for name, tensor in head_tensors().items() if name.startswith(old)}
    return dict.fromkeys(held) | {name.replace(old, new): tensor for name, tensor in held.items()}


def qwen3(tensors: dict | None = None) -> dict:
    norms = {f"midlayer.self_attn.{name}_norm.weight": shape(16) for name in "qk"}
    return norms | (tensors or {})


@pytest.mark.parametrize("name", [name for name in head_tensors() if name.startswith("midlayer.")] + ["norm.weight"])
def test_every_tensor_of_a_layer_is_needed(tmp_path, name):
    with pytest.raises(HeadError, match=f"{name} is missing from its tensors"):
        inspect(write_head(tmp_path, {name: None}))


def test_a_missing_tensor_is_named_as_the_head_spells_it(tmp_path):
    tensors = renamed("midlayer.", "layers.0.") | {"layers.0.mlp.up_proj.weight": None}
    with pytest.raises(HeadError, match=r": layers\.0\.mlp\.up_proj\.weight is missing"):
        inspect(write_head(tmp_path, tensors))


DAMAGED = [
    ({"midlayer.self_attn.q_proj.weight": shape(128, 128)}, {}, r"q_proj.weight has shape \(128, 128\); \(64, 128\)"),
    ({"midlayer.self_attn.k_proj.weight": shape(64, 128)}, {}, r"k_proj.weight has shape \(64, 128\); \(32, 128\)"),
    ({"midlayer.self_attn.v_proj.weight": shape(32, 64)}, {}, r"v_proj.weight has shape \(32, 64\); \(32, 128\)"),
    ({"midlayer.self_attn.o_proj.weight": shape(64, 32)}, {}, r"o_proj.weight has shape \(64, 32\); \(64, 64\)"),
    ({"midlayer.mlp.gate_proj.weight": shape(64, 64)}, {}, "gate_proj.weight has shape"),
    ({"midlayer.mlp.down_proj.weight": shape(64, 64)}, {}, "down_proj.weight has shape"),
    ({"norm.weight": shape(63)}, {}, "norm.weight has shape"),
    ({}, {"intermediate_size": 64}, "gate_proj.weight has shape"),
    ({}, {"head_dim": 32}, "q_proj.weight has shape"),
    ({}, {"num_key_value_heads": 4}, "k_proj.weight has shape"),
    ({}, {"num_attention_heads": 3}, "num_attention_heads is 3; hidden_size 64 is not a multiple"),
    ({}, {"num_key_value_heads": 3}, "num_key_value_heads is 3; num_attention_heads 4 is not a multiple"),
    ({}, {"num_hidden_layers": 2}, "num_hidden_layers is 2; its tensors are those of 1"),
    ({}, {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; its tensors"),
    ({}, {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    (layer_tensors("layers.1.", first=False), {}, "num_hidden_layers is 1; its tensors are those of 2"),
    (
        {"fc.weight": np.full((HIDDEN, 3 * HIDDEN), np.nan, np.float32)},
        {},
        "fc.weight holds values that are not",
    ),
    (
        {"fc.weight": np.full((HIDDEN, 3 * HIDDEN), np.inf, np.float16)},
        {},
        "fc.weight holds values that are not",
    ),
    ({"norm.weight": np.full(HIDDEN, -np.inf, np.float64)}, {}, "norm.weight holds values that are not finite"),
    (
        {"fc.weight": np.zeros((HIDDEN, 3 * HIDDEN), np.int8)},
        {},
        "fc.weight is of int8; allowed: a floating point",
    ),
    ({"foo.bar": shape(2)}, {}, "foo.bar is no tensor of an EAGLE-3 head"),
    ({"f" * 500: shape(2)}, {}, r"fff\.\.\. is no tensor of an EAGLE-3 head"),
    (renamed("fc.", "model.fc."), {}, "fc.weight is missing"),
    (renamed("d2t", "draft_id_to_target_id"), {}, "draft_id_to_target_id is no name of a vocabulary map"),
    ({}, {"max_position_embeddings": 1}, "max_position_embeddings is 1, so nothing would be drafted"),
    ({}, {"architectures": ["FooForCausalLM"]}, "architectures is 'FooForCausalLM'; allowed: an EAGLE-3 head"),
    ({}, {"architectures": ["EagleLlamaForCausalLM"]}, "architectures is 'EagleLlamaForCausalLM'"),
    ({}, {"architectures": ["Eagle3Qwen3ForCausalLM"]}, "q_norm.weight is missing"),
    (qwen3(), {}, "_norm.weight is no tensor"),
    ({}, {"attention_bias": True}, "q_proj.bias is missing"),
    ({}, {"fc_norm": True}, r"fc_norm\.0\.weight is missing"),
    ({}, {"eagle_config": {"norm_before_fc": True}}, "input_norm.weight is missing"),
]


@pytest.mark.parametrize(("tensors", "changes", "message"), DAMAGED, ids=[message for _, _, message in DAMAGED])
def test_a_damaged_head_is_one_error(tmp_path, tensors, changes, message):
    with pytest.raises(HeadError, match=message) as error:
        inspect(write_head(tmp_path, tensors, **changes))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"model: {tmp_path}: ")


BIASES = {"self_attn.q_proj.bias": 64, "self_attn.k_proj.bias": 32, "self_attn.v_proj.bias": 32}
WHOLE = [
    ("prefix of a list", renamed("midlayer.", "layers.0."), {}),
    ("two layers", layer_tensors("layers.1.", first=False), {"num_hidden_layers": 2}),
    (
        "spare norm",
        layer_tensors("layers.1.", first=False) | {"layers.1.hidden_norm.weight": shape(HIDDEN)},
        {"num_hidden_layers": 2},
    ),
    ("own embedding", {"embed_tokens.weight": shape(VOCAB, HIDDEN)}, {}),
    ("norm before residual", {}, {"norm_before_residual": True}),
    ("fc_norm", {f"fc_norm.{index}.weight": shape(HIDDEN) for index in range(3)}, {"fc_norm": True}),
    ("norm_before_fc", {"input_norm.weight": shape(3 * HIDDEN)}, {"norm_before_fc": True}),
    ("norm that is not loaded", {"input_norm.weight": shape(5)}, {}),
    ("rotary buffers", {"midlayer.self_attn.rotary_emb.inv_freq": shape(8)}, {}),
    (
        "attention bias",
        {f"midlayer.{name}": shape(size) for name, size in BIASES.items()}
        | {"midlayer.self_attn.o_proj.bias": shape(HIDDEN)},
        {"attention_bias": True},
    ),
    ("dropped bias", {"midlayer.self_attn.q_proj.bias": shape(64)}, {}),
    ("qwen3", qwen3(), {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}),
    (
        "qwen3 with wider heads",
        qwen3({"midlayer.self_attn.q_proj.weight": shape(48, 128), "midlayer.self_attn.o_proj.weight": shape(64, 48)})
        | {f"midlayer.self_attn.{name}_proj.weight": shape(16, 128) for name in "kv"},
        {
            "architectures": ["Eagle3Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    ("name of the layer's class", {}, {"architectures": ["LlamaForCausalLM"]}),
    ("no head_dim", {}, {"head_dim": None}),
    (
        "fused projections",
        {f"midlayer.self_attn.{name}_proj.weight": None for name in "qkv"}
        | {"midlayer.self_attn.qkv_proj.weight": shape(128, 128)}
        | {"midlayer.mlp.gate_proj.weight": None, "midlayer.mlp.up_proj.weight": None}
        | {"midlayer.mlp.gate_up_proj.weight": shape(256, 64)},
        {},
    ),
    (
        "quantized",
        {"midlayer.mlp.up_proj.weight": np.zeros((64, 32), np.int8), "midlayer.mlp.up_proj.weight_scale": shape(1)},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
    ),
    ("half precision", {"fc.weight": np.ones((HIDDEN, 3 * HIDDEN), np.float16)}, {}),
]


@pytest.mark.parametrize(("tensors", "changes"), [row[1:] for row in WHOLE], ids=[row[0] for row in WHOLE])
def test_a_whole_head_is_taken(tmp_path, tensors, changes):
    assert inspect(write_head(tmp_path, tensors, **changes))


def test_brain_floats_are_looked_at_and_no_map(tmp_path):
    from safetensors.torch import load_file, save_file

    write_head(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    halves = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in whole.items()}
    save_file(halves, tmp_path / "model.safetensors")
    assert inspect(tmp_path)
    save_file(halves | {"fc.weight": halves["fc.weight"] + float("nan")}, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match=r"fc\.weight holds values that are not finite"):
        inspect(tmp_path)
    save_file(halves | {"d2t": halves["d2t"].bfloat16()}, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match=r"d2t has shape \(128,\) of bfloat16; allowed: 128 integers"):
        inspect(tmp_path)


def test_large_tensors_are_not_read(tmp_path, monkeypatch):
    path = write_head(tmp_path, {"fc.weight": np.full((HIDDEN, 3 * HIDDEN), np.nan, np.float32)})
    monkeypatch.setattr(weights, "MAX_READ", 1000)
    assert inspect(path)
