"""The plugin where nobody asked for it, and its list of vLLM's symbols and versions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from engine_configs import CPU_ONLY, engine_config

from adaptivespec_vllm import plugin
from adaptivespec_vllm.engine import front_end, seams
from adaptivespec_vllm.engine import head as heads
from adaptivespec_vllm.engine.head import loading

vllm = pytest.importorskip("vllm")

pytestmark = [pytest.mark.usefixtures("registered"), CPU_ONLY]

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


def test_ray_workers_get_our_environment(monkeypatch):
    """Ray starts workers without the driver's variables but those whose names vLLM copies."""
    from vllm.ray.ray_env import get_env_vars_to_copy

    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE))
    assert {"VLLM_ADAPTIVESPEC_CHECK", "VLLM_ADAPTIVESPEC_CACHE"} <= names
    for name in names:
        monkeypatch.setenv(name, "1")
    assert names <= get_env_vars_to_copy()
