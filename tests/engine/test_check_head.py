"""Facts of an EAGLE-3 head directory; a head that cannot work is one error that names the field."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("safetensors")

from plugin_models import DRAFT_VOCAB, HIDDEN, LAYERS, VOCAB, layer_tensors, write_head, write_target

from adaptivespec_vllm.engine.head import HeadError, TargetFacts, check, inspect

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
