"""Our method asked for, in every way that there is: the finished engine configuration of real vLLM."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from engine_configs import CPU_ONLY, engine_config, from_command_line
from plugin_models import write_head
from vllm import LLM
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

from adaptivespec_vllm.config import resolve
from adaptivespec_vllm.engine import spec_config

pytestmark = [pytest.mark.usefixtures("registered"), CPU_ONLY]

WORKER = spec_config.WORKERS["cpu"]


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


def test_policy_sees_what_the_engine_got(target, options):
    speculative = engine_config(target, options).speculative_config
    assert speculative.adaptivespec == resolve({"model": options["model"], "margin": options["margin"]})
