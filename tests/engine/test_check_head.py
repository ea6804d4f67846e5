"""Facts of an EAGLE-3 head directory; a head that cannot work is one error that names the field."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("safetensors")

from plugin_models import DRAFT_VOCAB, HIDDEN, LAYERS, VOCAB, head_tensors, layer_tensors, write_head, write_target

from adaptivespec_vllm.engine.head import HeadError, TargetFacts, check, inspect
from adaptivespec_vllm.engine.head import weights as head_weights

TARGET = TargetFacts(VOCAB, HIDDEN, LAYERS)
ZEROS = np.zeros(DRAFT_VOCAB, np.int64)
OFFSETS = 3 * np.arange(DRAFT_VOCAB, dtype=np.int64)


def test_facts(tmp_path):
    facts = check(write_head(tmp_path), TARGET)
    assert facts is not None
    assert (facts.layout, facts.architecture) == ("eagle", "LlamaForCausalLMEagle3")
    assert (facts.aux_layers, facts.aux_count, facts.layers) == ((1, 2, 3), 3, 1)
    assert (facts.vocab_size, facts.draft_vocab_size, facts.vocab_map) == (VOCAB, DRAFT_VOCAB, "present")
    assert (facts.hidden_size, facts.target_hidden_size, facts.window) == (HIDDEN, HIDDEN, 256)
    assert (facts.own_embedding, facts.own_lm_head) == (False, True)
    json.dumps(facts.to_dict())


def test_target_facts_of_a_directory(tmp_path):
    assert TargetFacts.of_directory(write_target(tmp_path / "t")) == TARGET
    assert TargetFacts.of_directory(tmp_path / "nothing") is None
    assert TargetFacts.of_directory("some/hub-id") is None


def test_a_hub_id_is_left_to_vllm():
    assert check("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", TARGET) is None


def test_speculators_layout(tmp_path):
    write_head(tmp_path)
    layer = json.loads((tmp_path / "config.json").read_text())
    aux = layer.pop("eagle_aux_hidden_state_layer_ids")
    speculators = {
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "draft_vocab_size": layer.pop("draft_vocab_size"),
        "eagle_aux_hidden_state_layer_ids": aux,
        "transformer_layer_config": layer,
    }
    (tmp_path / "config.json").write_text(json.dumps(speculators))
    facts = inspect(tmp_path)
    assert (facts.layout, facts.aux_layers, facts.draft_vocab_size) == ("speculators", (1, 2, 3), DRAFT_VOCAB)

    (tmp_path / "config.json").write_text(json.dumps(speculators | {"speculators_model_type": "dflash"}))
    with pytest.raises(HeadError, match=r"speculators_model_type is 'dflash'; allowed: 'eagle3'"):
        inspect(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(speculators | {"transformer_layer_config": None}))
    with pytest.raises(HeadError, match="transformer_layer_config is missing"):
        inspect(tmp_path)


@pytest.mark.parametrize("d2t", [None, np.zeros(VOCAB, np.int64)], ids=["no map", "zero map"])
def test_a_full_vocabulary_needs_no_map(tmp_path, d2t):
    tensors = {"d2t": d2t, "lm_head.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    facts = check(write_head(tmp_path, tensors, draft_vocab_size=VOCAB), TARGET)
    assert facts is not None and facts.vocab_map == ("none" if d2t is None else "unused")


def test_offsets_over_a_full_vocabulary_are_refused(tmp_path):
    tensors = {"d2t": np.full(VOCAB, 1, np.int64), "lm_head.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    with pytest.raises(HeadError, match="d2t holds offsets although draft_vocab_size is the whole vocabulary"):
        inspect(write_head(tmp_path, tensors, draft_vocab_size=VOCAB))


def test_draft_vocabulary_defaults_to_the_whole(tmp_path):
    tensors = {"d2t": None, "lm_head.weight": None}
    assert inspect(write_head(tmp_path, tensors, draft_vocab_size=None)).draft_vocab_size == VOCAB


def test_four_auxiliary_layers(tmp_path):
    tensors = {"fc.weight": np.zeros((HIDDEN, 4 * HIDDEN), np.float32)}
    assert inspect(write_head(tmp_path, tensors, eagle_aux_hidden_state_layer_ids=[0, 1, 2, 4])).aux_count == 4


def test_layer_numbers_inside_eagle_config(tmp_path):
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}
    facts = inspect(write_head(tmp_path, eagle_aux_hidden_state_layer_ids=None, eagle_config=eagle))
    assert facts.aux_layers == (1, 2, 4)


def test_no_layer_numbers_leaves_them_to_the_target(tmp_path):
    facts = inspect(write_head(tmp_path, eagle_aux_hidden_state_layer_ids=None))
    assert (facts.aux_layers, facts.aux_count) == (None, 3)


def test_a_map_of_32_bits_is_taken(tmp_path):
    assert inspect(write_head(tmp_path, {"d2t": OFFSETS.astype(np.int32)})).vocab_map == "present"


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (None, "d2t is missing from its tensors; a head with draft_vocab_size 128 of 512 needs this map"),
        (ZEROS, "d2t holds only zeros"),
        (OFFSETS + 4, r"d2t\[127\] maps to target id 512 \(1 such entries\); allowed: 0 to 511"),
        (OFFSETS - 1, r"d2t\[0\] maps to target id -1"),
        (4 * np.arange(DRAFT_VOCAB, dtype=np.int64), r"maps to target id 515 .*as draft id \+ offset"),
        (np.where(np.arange(DRAFT_VOCAB) % 2 == 0, 0, -1).astype(np.int64), "to 64 target ids; each needs its own"),
        (OFFSETS[:-1], "has shape .127,. of int64; allowed: 128 integers"),
        (OFFSETS.astype(np.float32), "of float32; allowed: 128 integers"),
    ],
    ids=["absent", "zeros", "above", "below", "ids instead of offsets", "twice", "short", "floats"],
)
def test_a_reduced_vocabulary_needs_a_right_map(tmp_path, d2t, message):
    with pytest.raises(HeadError, match=message):
        inspect(write_head(tmp_path, {"d2t": d2t}))


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ({"fc.weight": None}, {}, "fc.weight is missing"),
        (
            {"fc.weight": np.zeros((HIDDEN, 2 * HIDDEN), np.float32)},
            {},
            r"fc.weight has shape \(64, 128\); \(64, 192\)",
        ),
        ({"midlayer.self_attn.q_proj.weight": np.zeros((64, 64), np.float32)}, {}, "q_proj.weight reads 64 values"),
        ({"lm_head.weight": None}, {}, "lm_head.weight is missing"),
        ({"lm_head.weight": np.zeros((99, HIDDEN), np.float32)}, {}, r"lm_head.weight has shape \(99, 64\)"),
        ({"embed_tokens.weight": np.zeros((9, HIDDEN), np.float32)}, {}, "embed_tokens.weight has shape"),
        ({}, {"draft_vocab_size": 1024}, "1024"),
        ({}, {"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({}, {"hidden_size": None}, "hidden_size is missing"),
        ({}, {"hidden_size": "64"}, "hidden_size is '64'"),
        ({}, {"architectures": None}, "architectures is missing"),
        ({}, {"architectures": ["PeagleLlamaForCausalLM"]}, "a parallel drafter"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, "ascending layer numbers"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, "3"]}, "ascending layer numbers"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight has shape"),
    ],
)
def test_a_head_that_contradicts_itself(tmp_path, tensors, changes, message):
    with pytest.raises(HeadError, match=message) as error:
        inspect(write_head(tmp_path, tensors, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (TargetFacts(VOCAB + 1, HIDDEN, LAYERS), "vocab_size is 512; the target's is 513"),
        (TargetFacts(VOCAB, 2 * HIDDEN, LAYERS), "hidden_size is 64; the target's is 128"),
        (TargetFacts(VOCAB, HIDDEN, 2), "names layer 3; the target has 2 layers"),
    ],
)
def test_a_head_of_another_target(tmp_path, target, message):
    with pytest.raises(HeadError, match=message):
        check(write_head(tmp_path), target)


def test_a_smaller_head_needs_its_own_embeddings(tmp_path):
    tensors = layer_tensors(hidden=32) | {
        "fc.weight": np.zeros((32, 3 * HIDDEN), np.float32),
        "norm.weight": np.zeros(32, np.float32),
        "lm_head.weight": np.zeros((DRAFT_VOCAB, 32), np.float32),
    }
    changes = {"hidden_size": 32, "target_hidden_size": HIDDEN}
    with pytest.raises(HeadError, match="hidden_size is 32; without embed_tokens"):
        check(write_head(tmp_path / "a", tensors, **changes), TARGET)
    tensors["embed_tokens.weight"] = np.zeros((VOCAB, 32), np.float32)
    assert check(write_head(tmp_path / "b", tensors, **changes), TARGET)


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
    monkeypatch.setattr(head_weights, "MAX_READ", 1000)
    assert inspect(path)


@pytest.mark.parametrize(
    "model", ["x" * 5000, "/" + "x" * 5000, "a\0b", "some/place/for/it", "a b!", "-a/b", "~/nothing here"]
)
def test_what_is_neither_directory_nor_hub_id(model):
    with pytest.raises(HeadError, match="no such directory") as error:
        check(model)
    assert len(str(error.value)) < 200
    assert "\0" not in str(error.value)


@pytest.mark.parametrize("model", ["head", "org/head-1.0_x", "s3://bucket/some/head"])
def test_what_may_be_elsewhere_is_left_to_vllm(model):
    assert check(model) is None


class TestDirectories:
    def test_missing(self, tmp_path):
        with pytest.raises(HeadError, match="no such directory"):
            check(str(tmp_path / "nothing"))

    def test_empty(self, tmp_path):
        with pytest.raises(HeadError, match=r"has no config\.json"):
            check(str(tmp_path))

    def test_broken_config(self, tmp_path):
        (tmp_path / "config.json").write_text('{"a": 1,\n}')
        with pytest.raises(HeadError, match="line 2 column 1"):
            check(str(tmp_path))
        (tmp_path / "config.json").write_text("[]")
        with pytest.raises(HeadError, match="not a JSON object"):
            check(str(tmp_path))
        for text, part in (("[" * 100_000, "nested too deeply"), ('{"a": ' + "9" * 5000 + "}", "cannot be read")):
            (tmp_path / "config.json").write_text(text)
            with pytest.raises(HeadError, match=part):
                check(str(tmp_path))
            assert TargetFacts.of_directory(tmp_path) is None

    def test_other_weight_formats(self, tmp_path):
        write_head(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(HeadError, match="holds no weights; needed"):
            check(str(tmp_path))
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        with pytest.raises(HeadError, match=r"holds only pytorch_model\.bin; needed: \*\.safetensors"):
            check(str(tmp_path))

    def test_broken_weights(self, tmp_path):
        write_head(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
        with pytest.raises(HeadError, match="not a readable safetensors file"):
            check(str(tmp_path))
