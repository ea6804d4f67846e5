"""The script for GPU machines, tried on a CPU: parts, report, JSON, a part that fails or takes too long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.gpu import report
from tests.gpu.attention import IMPLEMENTATIONS, check_of
from tests.gpu.checks import CHECKS, error_of, on
from tests.gpu.part import check, part
from tests.gpu.run import OPS, Run
from tests.gpu.timing import Timing

SCRIPT = Path(__file__).with_name("run.sh")
CPU = torch.device("cpu")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_a_dry_run_on_the_cpu(tmp_path):
    out = tmp_path / "gpu.json"
    done = run("--device", "cpu", "--seeds", "2", "--budget", "600", "--json", str(out), "--only", "commit_kv")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("2 passed, 0 failed")
    machine, op = json.loads(out.read_text())["parts"]
    assert machine["torch"] == torch.__version__
    assert machine["attention"] == list(IMPLEMENTATIONS)
    assert (op["name"], op["cases"], op["error"]) == ("commit_kv", 2, None)
    assert op["timings"][0]["warm"] > 0


def test_what_does_not_end_in_time_is_a_failure_of_its_own(tmp_path):
    parts = Run(Namespace(budget=5.5, seeds=1, device="cpu"))
    assert parts.part("op", "x", ["sleep", "60"])["error"] == "took more than 1 s"
    assert parts.part("op", "y", ["true"])["error"] == "no time left"
    done = run("--device", "cpu", "--budget", "4", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 1
    assert done.stdout.count("no time left") >= len(OPS)


BARE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"vllm", "pydantic", "pytest", "hypothesis", "typer", "rich", "psutil", "scipy"}:
            raise ModuleNotFoundError(f"{name} is not on a bare machine")
sys.meta_path.insert(0, Refuse())
import tests.gpu.part, tests.gpu.run
"""


def test_it_needs_nothing_but_torch():
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--device", "tpu"], ["--only", "linear"]])
def test_bad_arguments(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: tests/gpu/run.sh" in done.stderr


@pytest.mark.parametrize("name", OPS)
def test_every_op_is_checked_and_timed(name):
    result = part("op", name, CPU, 3)
    assert "error" not in result, result
    assert (result["cases"], result["worst"] <= 1) == (3, True)
    assert bool(result["timings"]) == (name != "tree_attention")  # an attention backend is what is timed in an engine


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_attention(name):
    if isinstance(why := IMPLEMENTATIONS[name](CPU), str):
        pytest.skip(why)
    for seed in range(6):
        check_of(name)(CPU, seed)


def test_the_parts_know_every_op():
    assert tuple(CHECKS) == OPS
    assert part("sanitizer", "build_tree commit_kv", CPU, 1) == {"cases": 2}


@pytest.mark.parametrize(
    ("kind", "output", "status", "error", "skipped"),
    [
        ("op", '{"cases": 3, "error": null}', 0, None, False),
        ("op", '{"cases": 1, "error": "seed 1: wrong"}', 1, "seed 1: wrong", False),
        ("op", "Segmentation fault", 139, "exit status 139\nSegmentation fault", False),
        ("sanitizer", '{"cases": 2}\n========= ERROR SUMMARY: 0 errors', 0, None, False),
        ("sanitizer", '{"cases": 2, "error": null}\n========= ERROR SUMMARY: 1 error', 9, "exit status 9", False),
        ("sanitizer", "========= Error: Device not supported", 1, None, True),
    ],
)
def test_what_a_part_says(kind, output, status, error, skipped):
    options = Namespace(budget=100.0, seeds=1, device="cpu")
    result = Run(options).part(kind, "x", ["bash", "-c", f"printf '%s\\n' '{output}'; exit {status}"])
    assert (result["error"] or "").startswith(error or "") and bool(result["error"]) == bool(error)
    assert ("skipped" in result) == skipped


def test_an_op_that_is_wrong_fails(monkeypatch):
    def spoilt(device, seed):
        got = torch.ones(4)
        got[2] = torch.nan
        return error_of(got, torch.ones(4), 1e-3)

    assert "off by" in check(spoilt, CPU, 5)["error"]
    monkeypatch.setitem(CHECKS, "commit_kv", spoilt)
    assert part("sanitizer", "build_tree commit_kv", CPU, 1)["error"]


def test_tensors_keep_their_strides_among_poison():
    wide = torch.arange(24.0).view(4, 6)
    moved = on(CPU, wide[:, 1:3])
    assert torch.equal(moved, wide[:, 1:3])
    assert moved.stride() == (6, 1)
    assert moved.as_strided((4, 6), (6, 1), 0).isnan().sum() == 16


def test_the_table():
    results = [
        {"kind": "machine", "name": "machine", "error": None, "gpu": "A GPU", "torch": "2.13", "cuda": "13.0"},
        {"kind": "op", "name": "walk_trees", "error": None, "cases": 20, "worst": 0.5,
         "timings": [Timing("walk_trees 1 x 64", 3.5, 6.0, 7.0, 30.0)._asdict() | {"ratio": 2.0}]},
        {"kind": "op", "name": "commit_kv", "error": "seed 3: wrong", "cases": 3},
        {"kind": "attention", "name": "xformers", "error": None, "skipped": "no xformers"},
    ]  # fmt: skip
    lines = list(report.table(results, "cuda"))
    assert lines[0] == "A GPU, torch 2.13, CUDA 13.0"
    assert any(line.split() == ["walk_trees", "20", "0.50"] for line in lines)
    assert any(line.split() == ["commit_kv", "3", "FAILED"] for line in lines)
    assert any(line.split() == ["attention:", "xformers", "0", "not", "run", "here"] for line in lines)
    assert any(line.split() == ["walk_trees", "1", "x", "64", "3.50", "6.0", "7.0", "2.0", "30.0"] for line in lines)
    assert lines[-1] == "FAILED op commit_kv: seed 3: wrong"
