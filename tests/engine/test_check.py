"""``adaptivespec check``: what it prints, its exit status, and no traceback for anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm")

from plugin_models import write_head, write_target  # noqa: E402
from typer.testing import CliRunner  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from adaptivespec_vllm.check.report import Report  # noqa: E402
from adaptivespec_vllm.cli import app  # noqa: E402
from adaptivespec_vllm.config import resolve  # noqa: E402
from adaptivespec_vllm.engine import seams  # noqa: E402

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU worker is asked for")


@pytest.fixture
def head(tmp_path):
    return write_head(tmp_path / "head")


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


@pytest.fixture
def file(tmp_path, head):
    return write(tmp_path, {"method": "adaptivespec", "model": head, "margin": {"kappa": 0.3}})


def write(path, options) -> str:
    (path / "adaptivespec.json").write_text(options if isinstance(options, str) else json.dumps(options))
    return str(path / "adaptivespec.json")


def check(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout


def test_without_a_file_it_says_what_is_here():
    status, output = check()
    assert status == 0
    for part in (vllm.__version__, "V1", f"{len(seams.check_seams())} found", "cpu", "lossless", "tree.shape"):
        assert part in output
    assert output.splitlines()[-1] == "ready"


def test_json_holds_the_resolved_configuration(file, head):
    status, output = check(file, "--json")
    report = json.loads(output)
    assert (status, report["ok"], report["errors"]) == (0, True, [])
    assert report["configuration"] == resolve({"model": head, "margin": {"kappa": 0.3}}).to_resolved_dict()
    assert report["vllm"]["version"] == vllm.__version__
    assert report["runner"]["name"] == "V1"
    assert all(seam["found"] for seam in report["seams"])
    assert report["head"]["aux_layers"] == [1, 2, 3]
    assert report["head"]["vocab_map"] == "present"
    assert report["verification"].startswith("lossy")
    assert report["ops"]


def test_with_a_target_the_whole_start_up_check_runs(file, target):
    status, output = check(file, "--model", target)
    assert status == 0, output
    assert "the target's choice" in output


def test_plain_text_away_from_a_terminal(file):
    assert "\x1b" not in check(file)[1]


def test_lines_are_not_folded(tmp_path, head):
    long = head + "/" + "x" * 200
    status, output = check(write(tmp_path, {"method": "adaptivespec", "model": long}))
    assert status == 1
    assert long in output


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ('{"method": "adaptivespec",}', "line 1 column 27"),
        ("[]", "a JSON object"),
        ({"method": "adaptivespec", "model": "h/h", "tre": 1}, "tre: unknown key; did you mean 'tree'?"),
        ({"method": "adaptivespec", "model": "h/h", "margin": {"kappa": "x"}}, "margin.kappa: got"),
        ({"method": "adaptivespec", "model": "h/h", "num_speculative_tokens": 99}, "num_speculative_tokens: got 99"),
        (
            {"method": "adaptivespec", "model": "h/h", "num_speculative_tokens": 3, "tree": {"low": {"nodes": 4}}},
            "tree.low",
        ),
        ({"method": "adaptivespec", "model": "h/h", "parallel_drafting": True}, "parallel_drafting: got True"),
        ({"method": "adaptivespec", "model": "h/h", "max_model_len": "x"}, "max_model_len: got 'x'"),
        ({"method": "adaptivespec"}, "model: missing"),
        ({"method": "eagle3", "model": "h/h"}, "method: got"),
        ({"model": "h/h"}, "method: missing"),
        ({"method": "adaptivespec", "model": "/no/head"}, "/no/head: no such directory"),
        ({"method": "adaptivespec", "model": "no/such/head"}, "no/such/head: no such directory"),
        ({"method": "adaptivespec", "model": "h/h", "kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: got 'fp8_e5m2'"),
        ({"method": "adaptivespec", "model": "h/h", "quantization": "junk"}, "quantization: got 'junk'"),
        ({"method": "adaptivespec", "model": "h/h", "attention_backend": "X"}, "attention_backend: got 'X'"),
    ],
)
def test_bad_input_is_one_line_and_status_one(tmp_path, options, part):
    file = write(tmp_path, options)
    for arguments in ([file], [file, "--json"], [file, "--model", "/no/target"]):
        status, output = check(*arguments)
        assert status == 1
        assert part in output.replace('\\"', '"')
    assert output.splitlines()[-1] == "not ready"
    assert len([line for line in output.splitlines() if line.startswith("error")]) == 1


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("/no/target", "--model: /no/target: no such directory"),
        ("~/no target", "--model: ~/no target: no such directory"),
        ("no/such/target", "--model: no/such/target: no such directory"),
        ("/" + "x" * 5000, "xxx...: no such directory"),
        ("", "--model: got ''; allowed"),
    ],
)
def test_a_target_that_is_not_there(file, target, part):
    for arguments in ([file, "--model", target], ["--model", target]):
        status, output = check(*arguments)
        assert status == 1
        assert part in output


def test_a_target_without_a_configuration_is_not_checked(target):
    status, output = check("--model", target)
    assert status == 1
    assert f"nothing was checked against {target!r}" in output
    assert output.splitlines()[-1] != "ready"


def test_reasons_of_vllm_are_kept(tmp_path, file):
    nameless = write_target(tmp_path / "nope", architectures=["Nope"])
    uneven = write_target(tmp_path / "uneven", num_attention_heads=3)
    parts = ("Model architectures ['Nope'] are not supported", "is not a multiple of the number of attention heads")
    for target, part in zip((nameless, uneven), parts, strict=True):
        (error,) = Report.gather(Path(file), target).errors
        assert part in error
        assert "\n" not in error
        assert len(error) <= 300


def test_missing_file(tmp_path):
    status, output = check(str(tmp_path / "none.json"))
    assert status == 1
    assert "none.json: no such file" in output


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"vocab_size": 500}, "vocab_size is 512; the target's is 500"),
        ({"hidden_size": 128}, "hidden_size is 64; the target's is 128"),
        ({"num_hidden_layers": 2}, "names layer 3; the target has 2 layers"),
    ],
)
def test_head_that_does_not_fit(tmp_path, file, changes, part):
    status, output = check(file, "--model", write_target(tmp_path / "other", **changes))
    assert status == 1
    assert part in output


def test_head_without_its_map(tmp_path):
    head = write_head(tmp_path / "h", {"d2t": None})
    status, output = check(write(tmp_path, {"method": "adaptivespec", "model": head}))
    assert status == 1
    assert "d2t is missing" in output


def test_unsupported_target(tmp_path, file):
    mixtral = write_target(tmp_path / "m", architectures=["MixtralForCausalLM"], model_type="mixtral")
    status, output = check(file, "--model", mixtral)
    assert status == 1
    assert "does not support EAGLE-3 heads" in output


def test_target_that_is_no_model(tmp_path, file):
    (tmp_path / "empty").mkdir()
    status, output = check(file, "--model", str(tmp_path / "empty"))
    assert status == 1
    assert len([line for line in output.splitlines() if line.startswith("error")]) == 1


def test_unsupported_vllm(file, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    status, output = check(file)
    assert status == 1
    assert "version 0.40.0 is not supported; needed: vllm>=0.32,<0.34" in output
    assert "margin.kappa: 0.3" in output  # the configuration is still looked at


def test_missing_symbol(file, monkeypatch):
    gone = seams.Seam("vllm.engine.arg_utils:EngineArgs.gone", "a test", "front")
    monkeypatch.setattr(seams, "SEAMS", [*seams.SEAMS, gone])
    status, output = check(file)
    assert status == 1
    assert "missing vllm.engine.arg_utils:EngineArgs.gone" in output


def test_plugin_switched_off(file, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    status, output = check(file)
    assert status == 1
    assert "VLLM_PLUGINS: got 'another'" in output


def test_plugin_not_installed(file, monkeypatch):
    monkeypatch.setattr("adaptivespec_vllm.check.report.entry_points", lambda group: [])
    status, output = check(file)
    assert status == 1
    assert "install this package" in output


def test_v2_runner(file, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    status, output = check(file)
    assert status == 1
    assert "VLLM_USE_V2_MODEL_RUNNER" in output


def test_native_ops_may_be_absent(file, monkeypatch):
    import adaptivespec_vllm.ops

    monkeypatch.delattr(adaptivespec_vllm.ops, "describe")
    assert check(file)[0] in (0, 1)
