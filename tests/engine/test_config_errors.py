"""Speculative configurations that cannot be used: one error each, on the command line and in Python."""

from __future__ import annotations

import json

import pytest
from engine_configs import CPU_ONLY, engine_config
from plugin_models import write_head

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.engine import head as heads

pytestmark = [pytest.mark.usefixtures("registered"), CPU_ONLY]


def refused(parser, capsys, *argv) -> str:
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(list(argv))
    assert stop.value.code != 0
    return capsys.readouterr().err.splitlines()[-1]


class TestCommandLine:
    def test_text_that_is_no_path_is_parsed_by_vllm(self, parser, capsys):
        assert parser.parse_args(["-sc", '{"method": "ngram"}']).speculative_config == {"method": "ngram"}
        assert parser.parse_args(["-sc", "None"]).speculative_config is None
        assert parser.parse_args(["-sc", ""]).speculative_config is None
        assert "cannot be converted" in refused(parser, capsys, "-sc", "junk")
        assert "cannot be converted" in refused(parser, capsys, "-sc", '{"method": "ngram",}')

    def test_text_that_is_too_long_for_a_path(self, parser, capsys):
        assert "cannot be converted" in refused(parser, capsys, "-sc", "x" * 5000)
        message = refused(parser, capsys, "-sc", "/" + "x" * 5000)
        assert "cannot be read (File name too long)" in message
        assert len(message) < 400

    def test_missing_file(self, parser, capsys):
        assert "/no/such.json: no such file" in refused(parser, capsys, "-sc", "/no/such.json")
        assert "such.json: no such file" in refused(parser, capsys, "-sc", "such.json")

    def test_broken_file_and_text_name_line_and_column(self, parser, capsys, tmp_path):
        broken = '{"method": "adaptivespec",\n "model": }'
        (tmp_path / "b.json").write_text(broken)
        for argument in (broken, str(tmp_path / "b.json")):
            assert "line 2 column 11" in refused(parser, capsys, "-sc", argument)


FAULTS = [
    ({"tre": {}}, ["tre: unknown key", "'tree'"]),
    ({"revison": "x"}, ["revison: unknown key", "'revision'"]),
    ({"target_model_config": {}}, ["target_model_config: unknown key"]),
    ({"tree": {"high": {"nodes": 99}}}, ["tree.high.nodes", "99", "1 to 63"]),
    ({"num_speculative_tokens_per_batch_size": [[1, 4, 3]]}, ["num_speculative_tokens_per_batch_size", "policy"]),
    ({"parallel_drafting": True}, ["parallel_drafting"]),
    ({"use_heterogeneous_vocab": True}, ["use_heterogeneous_vocab"]),
    ({"draft_sample_method": "probabilistic"}, ["draft_sample_method"]),
    ({"rejection_sample_method": "block"}, ["rejection_sample_method"]),
    ({"use_local_argmax_reduction": True}, ["use_local_argmax_reduction"]),
    ({"prompt_lookup_max": 4}, ["prompt_lookup_max", "ngram"]),
    ({"suffix_decoding_max_tree_depth": 5}, ["suffix_decoding_max_tree_depth", "suffix"]),
    ({"synthetic_acceptance_length": 2.0}, ["synthetic_acceptance_length"]),
    ({"enable_adaptive_verification": True}, ["enable_adaptive_verification"]),
    ({"tensor_parallel_size": 1}, ["tensor_parallel_size", "draft_tensor_parallel_size"]),
    ({"disable_padded_drafter_batch": False}, ["disable_padded_drafter_batch", "allowed: True"]),
    ({"draft_tensor_parallel_size": "two"}, ["draft_tensor_parallel_size", "'two'"]),
    ({"max_model_len": 0}, ["max_model_len", "got 0"]),
    ({"kv_cache_dtype": "int7"}, ["kv_cache_dtype", "int7"]),
    ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype", "head"]),
    ({"kv_cache_dtype": "float16"}, ["kv_cache_dtype", "head"]),
    ({"kv_cache_dtype": "bfloat16"}, ["kv_cache_dtype", "'bfloat16'"]),
    ({"quantization": "junk"}, ["quantization: got 'junk'", "allowed", "fp8"]),
    ({"attention_backend": "JUNK"}, ["attention_backend: got 'JUNK'", "allowed", "CPU_ATTN"]),
    ({"attention_backend": "FLASH_ATTN"}, ["attention_backend: got 'FLASH_ATTN'", "no effect on a CPU", "'CPU_ATTN'"]),
    ({"attention_backend": 3}, ["attention_backend: got 3"]),
    ({"enforce_eager": "yes"}, ["enforce_eager: got 'yes'", "allowed: true or false or null"]),
    ({"disable_eagle_block_drop": 1}, ["disable_eagle_block_drop: got 1", "allowed: true or false"]),
    ({"draft_tensor_parallel_size": "1"}, ["draft_tensor_parallel_size: got '1'"]),
    ({"max_model_len": 1}, ["max_model_len: got 1", "at least 2"]),
    ({"draft_load_config": {"load_format": "dummy"}}, ["draft_load_config.load_format: got 'dummy'", "allowed"]),
    ({"_adaptivespec_request": {"method": "adaptivespec"}}, ["_adaptivespec_request: unknown key"]),
    ({"_adaptivespec_request": 5}, ["_adaptivespec_request: unknown key"]),
    ({"model": "x" * 5000}, ["model", "xxx...: no such directory"]),
    ({"model": "a\0b"}, ["model", "no such directory"]),
    ({"model": "/no/such/head"}, ["model", "/no/such/head", "no such directory"]),
    ({"model": None}, ["model: missing"]),
]


@pytest.mark.parametrize(("change", "parts"), FAULTS, ids=[parts[0] for _, parts in FAULTS])
def test_faults_are_ours_and_name_the_key(target, options, change, parts):
    with pytest.raises(ConfigError) as error:
        engine_config(target, options | change)
    assert [part for part in parts if part not in str(error.value)] == []
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("backend", [None, "CPU_ATTN", "cpu_attn", "auto"])
def test_the_one_backend_of_a_cpu_may_be_named(target, options, backend):
    assert engine_config(target, options | {"attention_backend": backend}).speculative_config.adaptivespec


@pytest.mark.parametrize("source", [[1], [], 5, 0, True, False, b"{}", "", " "], ids=repr)
@pytest.mark.parametrize("flags", [{}, {"spec_method": "adaptivespec"}], ids=["", "flag"])
def test_what_cannot_hold_a_method(target, source, flags):
    with pytest.raises(ConfigError, match=r"speculative_config: got .*; allowed: an object"):
        engine_config(target, source, **flags)


def test_a_head_that_vllm_cannot_read_is_named_with_the_reason(target, tmp_path):
    path = write_head(tmp_path, model_type="junk")
    with pytest.raises(ConfigError, match="junk") as error:
        engine_config(target, {"method": "adaptivespec", "model": path})
    assert path in str(error.value)
    assert "\n" not in str(error.value)


def test_a_damaged_head_is_refused_at_start(target, tmp_path):
    path = write_head(tmp_path, {"norm.weight": None})
    with pytest.raises(heads.HeadError, match=r"norm\.weight is missing"):
        engine_config(target, {"method": "adaptivespec", "model": path})


def test_home_directory_in_path_and_model(target, options, tmp_path, monkeypatch):
    path = write_head(tmp_path / "head")
    (tmp_path / "a.json").write_text(json.dumps(options | {"model": "~/head"}))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert engine_config(target, "~/a.json").speculative_config.model == path


def test_a_key_given_twice_is_refused(target, head, options):
    with pytest.raises(ConfigError, match="model: given in speculative_config and by --spec-model"):
        engine_config(target, options, spec_model=head)


def test_text_that_is_neither_path_nor_json(target):
    with pytest.raises(ConfigError, match="no such file"):
        engine_config(target, "adaptive")
