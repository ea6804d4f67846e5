"""The plugin inside real vLLM, up to the finished engine configuration; no engine is started."""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

vllm = pytest.importorskip("vllm")

from plugin_models import write_head, write_target  # noqa: E402
from vllm import LLM  # noqa: E402
from vllm.config.speculative import SpeculativeConfig  # noqa: E402
from vllm.config.utils import replace  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs  # noqa: E402
from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from adaptivespec_vllm import plugin  # noqa: E402
from adaptivespec_vllm.config import ConfigError, resolve  # noqa: E402
from adaptivespec_vllm.engine import front_end, refusals, seams, spec_config  # noqa: E402
from adaptivespec_vllm.engine import head as heads  # noqa: E402
from adaptivespec_vllm.engine.head import loading  # noqa: E402

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU worker is asked for")

WORKER = spec_config.WORKERS["cpu"]


@pytest.fixture(scope="module", autouse=True)
def registered():
    plugin.register()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def options(head):
    return {"method": "adaptivespec", "model": head, "margin": {"kappa": 0.3}, "enforce_eager": True}


@pytest.fixture(scope="module")
def parser():
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.fixture
def file(tmp_path, options):
    path = tmp_path / "adaptivespec.json"
    path.write_text(json.dumps(options, indent=2))
    return path


def engine_config(target, speculative_config=None, **kwargs):
    settings = {"dtype": "float32", "max_model_len": 256} | kwargs
    return EngineArgs(model=target, speculative_config=speculative_config, **settings).create_engine_config()


def from_command_line(parser, target, *argv):
    arguments = parser.parse_args(["--model", target, "--dtype", "float32", "--max-model-len", "256", *argv])
    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


def refused(parser, capsys, *argv) -> str:
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(list(argv))
    assert stop.value.code != 0
    return capsys.readouterr().err.splitlines()[-1]


class TestAskedFor:
    def test_it_is_an_eagle3_configuration_that_carries_ours(self, target, head, options):
        config = engine_config(target, options)
        speculative = config.speculative_config
        assert isinstance(speculative, SpeculativeConfig)
        assert (speculative.method, speculative.model, speculative.num_speculative_tokens) == ("eagle3", head, 24)
        assert speculative.use_eagle()
        assert speculative.disable_padded_drafter_batch
        assert speculative.enforce_eager
        assert speculative.adaptivespec.margin.kappa == 0.3
        assert config.parallel_config.worker_cls == WORKER
        assert not config.use_v2_model_runner
        assert not config.scheduler_config.async_scheduling
        assert "adaptivespec" in repr(speculative)

    def test_path_text_dict_and_command_line_are_equal(self, target, head, options, file, parser):
        text = json.dumps(options)
        dotted = ["--speculative-config.method", "adaptivespec", "--speculative-config.model", head]
        dotted += ["--speculative-config.margin.kappa", "0.3", "--speculative-config.enforce-eager", "true"]
        configs = [
            engine_config(target, options),
            engine_config(target, str(file)),
            engine_config(target, file),
            engine_config(target, text),
            from_command_line(parser, target, "--speculative-config", str(file)),
            from_command_line(parser, target, "-sc", text),
            from_command_line(parser, target, *dotted),
        ]
        first = configs[0].speculative_config
        for config in configs[1:]:
            assert config.speculative_config.adaptivespec == first.adaptivespec
            assert config.speculative_config.enforce_eager == first.enforce_eager
            assert config.compute_hash() == configs[0].compute_hash()

    def test_a_relative_path_without_a_slash(self, target, file, monkeypatch):
        monkeypatch.chdir(file.parent)
        assert engine_config(target, file.name).speculative_config.adaptivespec.margin.kappa == 0.3

    @pytest.mark.parametrize("form", ["path", "text", "dict"])
    def test_llm_takes_every_form(self, target, options, file, form, monkeypatch):
        class Stop(Exception):
            pass

        def stop(engine_args, **kwargs):
            built.append(engine_args.create_engine_config())
            raise Stop

        built: list = []
        monkeypatch.setattr(LLMEngine, "from_engine_args", stop)
        source = {"path": str(file), "text": json.dumps(options), "dict": options}[form]
        with pytest.raises(Stop):
            LLM(model=target, dtype="float32", max_model_len=256, speculative_config=source)
        assert built[0].speculative_config.adaptivespec.margin.kappa == 0.3

    def test_vllm_serve_takes_a_path(self, target, file):
        serve = make_arg_parser(FlexibleArgumentParser())
        arguments = serve.parse_args(["--model", target, "--speculative-config", str(file)])
        assert arguments.speculative_config["method"] == "adaptivespec"

    def test_vllm_finds_the_installed_plugin_by_itself(self, target, file):
        if not any(entry.name == "adaptivespec" for entry in entry_points(group="vllm.general_plugins")):
            pytest.skip("the package is not installed")
        script = (
            "import sys; from vllm.engine.arg_utils import EngineArgs; "
            "arguments = EngineArgs(model=sys.argv[1], speculative_config=sys.argv[2], max_model_len=256); "
            "print('kappa', arguments.create_engine_config().speculative_config.adaptivespec.margin.kappa)"
        )
        command = [sys.executable, "-c", script, target, str(file)]
        assert "kappa 0.3" in subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def test_flags_of_vllm(self, target, head, parser):
        argv = ["--spec-method", "adaptivespec", "--spec-model", head, "--spec-tokens", "5"]
        config = from_command_line(parser, target, *argv)
        assert config.speculative_config.num_speculative_tokens == 5
        assert config.speculative_config.adaptivespec.tree.shape.depth == 5
        config = engine_config(target, spec_method="adaptivespec", spec_model=head)
        assert config.speculative_config.num_speculative_tokens == 24

    def test_flags_beside_a_dict(self, target, head):
        config = engine_config(target, {"method": "adaptivespec"}, spec_model=head)
        assert config.speculative_config.adaptivespec.model == head

    def test_the_same_arguments_can_be_used_twice(self, target, head):
        arguments = EngineArgs(model=target, spec_method="adaptivespec", spec_model=head, max_model_len=256)
        assert arguments.create_engine_config().compute_hash() == arguments.create_engine_config().compute_hash()

    def test_pickle_and_replace_keep_our_settings(self, target, options):
        config = engine_config(target, options)
        for again in (pickle.loads(pickle.dumps(config)), replace(config)):
            assert type(again.speculative_config) is spec_config.AdaptiveSpecSpeculativeConfig
            assert again.speculative_config.adaptivespec == config.speculative_config.adaptivespec
            assert again.speculative_config.num_speculative_tokens == 24
            assert again.compute_hash() == config.compute_hash()

    @pytest.mark.parametrize(
        "change",
        [
            {"num_speculative_tokens": 9},
            {"margin": None},
            {"tree": {"scope": "batch"}},
            {"tree": {"low": {"width": 3}}},
            {"signal": {"alpha": 0.2}},
        ],
    )
    def test_every_setting_enters_the_hash(self, target, options, change):
        speculative = [engine_config(target, o).speculative_config for o in (options, options | change)]
        assert speculative[0].compute_hash() != speculative[1].compute_hash()

    def test_keys_of_vllm_stay_valid(self, target, options):
        more = {"draft_tensor_parallel_size": 1, "disable_eagle_block_drop": True, "max_model_len": 128}
        speculative = engine_config(target, options | more).speculative_config
        assert speculative.disable_eagle_block_drop
        assert not speculative.use_eagle_block_drop()
        assert speculative.draft_model_config.max_model_len == 128

    def test_defaults_of_refused_keys_are_harmless(self, target, options):
        defaults = {"parallel_drafting": False, "draft_sample_method": "greedy", "rejection_sample_method": "standard"}
        assert engine_config(target, options | defaults).speculative_config.adaptivespec

    def test_own_worker_may_be_named(self, target, options):
        assert engine_config(target, options, worker_cls=WORKER).parallel_config.worker_cls == WORKER

    def test_head_as_the_model_finds_its_target(self, target, tmp_path):
        """vLLM replaces a speculators checkpoint given as the model by its verifier."""
        path = write_head(tmp_path / "speculators")
        flat = json.loads((tmp_path / "speculators" / "config.json").read_text())
        flat.pop("draft_vocab_size")
        speculators = {
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 128,
            "transformer_layer_config": flat,
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": target},
            },
        }
        (tmp_path / "speculators" / "config.json").write_text(json.dumps(speculators))
        config = engine_config(path, {"method": "adaptivespec", "margin": {"kappa": 0.5}})
        assert config.model_config.model == target
        assert config.speculative_config.model == path
        assert config.speculative_config.num_speculative_tokens == 24
        assert config.speculative_config.adaptivespec.margin.kappa == 0.5
        assert engine_config(target, {"method": "adaptivespec", "model": path}).speculative_config.adaptivespec


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


class TestNotAskedFor:
    @pytest.mark.parametrize(
        "options", [NGRAM, {"method": "eagle3", "num_speculative_tokens": 3}, None], ids=["ngram", "eagle3", "none"]
    )
    def test_other_methods_are_vllms_own(self, target, head, options):
        if options and options["method"] == "eagle3":
            options = options | {"model": head}
        ours = engine_config(target, options and dict(options))
        for wrap in plugin.WRAPS:
            wrap.uninstall()
        try:
            assert not any(wrap.installed() for wrap in plugin.WRAPS)
            stock = engine_config(target, options and dict(options))
        finally:
            plugin.register()
        assert type(ours.speculative_config) is type(stock.speculative_config)
        assert ours.compute_hash() == stock.compute_hash()
        assert (
            ours.parallel_config.worker_cls == stock.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
        )

    def test_a_path_serves_other_methods_too(self, target, tmp_path):
        (tmp_path / "n.json").write_text(json.dumps(NGRAM))
        assert engine_config(target, str(tmp_path / "n.json")).speculative_config.method == "ngram"

    def test_text_that_is_no_path_is_parsed_by_vllm(self, parser, capsys):
        assert parser.parse_args(["-sc", '{"method": "ngram"}']).speculative_config == {"method": "ngram"}
        assert parser.parse_args(["-sc", "None"]).speculative_config is None
        assert parser.parse_args(["-sc", ""]).speculative_config is None
        assert "cannot be converted" in refused(parser, capsys, "-sc", "junk")
        assert "cannot be converted" in refused(parser, capsys, "-sc", '{"method": "ngram",}')

    def test_unknown_methods_are_refused_by_vllm(self, target):
        with pytest.raises(ValueError, match="method"):
            engine_config(target, {"method": "adaptive", "num_speculative_tokens": 3})

    def test_nothing_of_vllm_is_checked(self, target, monkeypatch):
        monkeypatch.setattr(vllm, "__version__", "0.99.0")
        assert engine_config(target).speculative_config is None

    def test_registering_again_changes_nothing(self):
        before = [wrap.seam.resolve() for wrap in plugin.WRAPS]
        plugin.register()
        assert [wrap.seam.resolve() for wrap in plugin.WRAPS] == before
        assert all(wrap.installed() and not wrap.install() for wrap in plugin.WRAPS)

    def test_a_missing_seam_does_not_stop_vllm(self, monkeypatch):
        gone = seams.Wrap(seams.Seam("vllm.engine.arg_utils:EngineArgs.gone", "test"), front_end.add_cli_args)
        monkeypatch.setattr(plugin, "WRAPS", (gone,))
        plugin.register()


class TestCommandLineErrors:
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


class TestVersions:
    @pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1rc2.dev5+g123", "v0.32.0"])
    def test_supported(self, version):
        assert seams.check_version(version) == version

    @pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.34.0rc1", "1.32.0", "0.3.2", "dev"])
    def test_unsupported_is_named_with_the_range(self, version):
        with pytest.raises(seams.UnsupportedVLLM, match=r"not supported; needed: vllm>=0\.32,<0\.34"):
            seams.check_version(version)

    def test_asked_for_on_another_version(self, target, options, monkeypatch):
        monkeypatch.setattr(vllm, "__version__", "0.34.0")
        with pytest.raises(seams.UnsupportedVLLM, match=r"0\.34\.0"):
            engine_config(target, options)

    def test_asked_for_with_a_symbol_gone(self, target, options, monkeypatch):
        gone = seams.Seam("vllm.engine.arg_utils:EngineArgs.gone", "a test", "front")
        monkeypatch.setattr(seams, "SEAMS", [*seams.SEAMS, gone])
        with pytest.raises(seams.UnsupportedVLLM, match=r"EngineArgs\.gone \(a test\)"):
            engine_config(target, options)

    def test_every_seam_is_there(self):
        assert [status for status in seams.check_seams() if not status.found] == []

    def test_every_seam_says_why(self):
        assert all(seam.why and seam.tested for seam in seams.SEAMS)


@pytest.mark.parametrize(("own_map", "passed"), [(None, ["a"]), (object(), ["a", "d2t"])])
def test_a_map_that_is_not_needed_is_not_loaded(own_map, passed):
    class Head:
        draft_id_to_target_id = own_map

        def load_weights(self, weights):
            return [name for name, _ in weights]

    assert loading._without_unused_map(Head.load_weights, Head(), [("a", 0), ("d2t", 0)]) == passed


def test_head_loading_is_wrapped_once():
    heads.install_loading()
    heads.install_loading()
    for seam in seams.HEAD_LOADING:
        wrap = seams.Wrap(seam, loading._without_unused_map)
        assert wrap.installed()
        wrap.uninstall()
        assert not wrap.installed()


def test_policy_sees_what_the_engine_got(target, options):
    speculative = engine_config(target, options).speculative_config
    assert speculative.adaptivespec == resolve({"model": options["model"], "margin": options["margin"]})
