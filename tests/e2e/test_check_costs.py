"""``adaptivespec check`` and the costs of a step: measured, kept from an earlier start, given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adaptivespec_vllm import runtime
from adaptivespec_vllm.check.costs import CostsFound, nearly_free_rows, tokens_to_pay
from adaptivespec_vllm.cli import app
from adaptivespec_vllm.engine import cost_cache
from adaptivespec_vllm.policy.costs import Costs

TABLES = {
    "target": [[1, 0.020], [4, 0.022], [8, 0.030], [16, 0.060]],
    "first": [[1, 0.002], [16, 0.004]],
    "level": [[1, 0.001], [16, 0.003]],
    "overhead": 0.005,
}
VERSIONS = {"adaptivespec": "0", "vllm": "0", "torch": "0"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(runtime.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def configuration(tmp_path: Path, tiny_head: Path) -> Any:
    def write(**tree: Any) -> str:
        path = tmp_path / "adaptivespec.json"
        path.write_text(json.dumps({"method": "adaptivespec", "model": str(tiny_head), "tree": tree}))
        return str(path)

    return write


def check(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def facts(target: Path, head: Path, **more: Any) -> dict[str, Any]:
    known = {"machine": runtime.machine(), "target": str(target), "head": str(head), "dtype": "float32", "threads": 3}
    return known | {"ranks": 1, "rows": 99, "packed levels": True, "versions": VERSIONS} | more


def test_what_follows_from_costs() -> None:
    costs = Costs.from_dict(TABLES)
    assert nearly_free_rows(costs) == 4
    assert tokens_to_pay(costs, 1) == pytest.approx(
        {"the first pass": 0.002 / 0.025, "a level of one node": 0.001 / 0.025, "a verified node": (1 / 1500) / 0.025}
    )
    lines = list(CostsFound("somewhere", costs).lines())
    assert lines[0] == "somewhere"
    assert lines[2].split() == ["target", "20.00", "20.67", "22.00", "30.00", "60.00"]
    assert "up to 4 rows" in lines[5]


def test_costs_of_one_row_alone() -> None:
    costs = Costs.from_dict({name: [[1, 0.01]] for name in ("target", "first", "level")})
    assert nearly_free_rows(costs) == 1
    assert list(CostsFound("x", costs).lines())


def test_costs_of_an_earlier_start(configuration: Any, tiny_target: Path, tiny_head: Path) -> None:
    status, output = check(configuration(), "--model", str(tiny_target))
    assert status == 0 and "measured at the first start of this target and head here" in output
    cost_cache.keep(facts(tiny_target, tiny_head), Costs.from_dict(TABLES))
    cost_cache.keep(facts(tiny_target, tiny_target), Costs.from_dict(TABLES))  # another head
    cost_cache.keep(facts(tiny_target, tiny_head, machine="another"), Costs.from_dict(TABLES))
    status, output = check(configuration(), "--model", os.path.relpath(tiny_target))
    assert status == 0
    assert "measured at a start of" in output and "more of other settings" not in output
    assert "float32, 3 threads" in output and "up to 4 rows" in output
    report = json.loads(check(configuration(), "--model", str(tiny_target), "--json")[1])["costs"]
    assert Costs.from_dict(report["costs"]) == Costs.from_dict(TABLES)
    assert report["nearly_free_rows"] == 4


def test_costs_of_a_file(configuration: Any, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(TABLES))
    status, output = check(configuration(costs=str(file)))
    assert status == 0 and f"of the file {file}" in output and "up to 4 rows" in output
    file.write_text("{}")
    status, output = check(configuration(costs=str(file)))
    assert status == 1 and f"{file}: target: missing" in output


def test_nothing_to_show_or_measure(configuration: Any, tiny_target: Path) -> None:
    static = {"policy": "static", "shape": {"depth": 2, "width": 1, "nodes": 2}}
    assert "policy 'static' asks for none" in check(configuration(**static))[1]
    assert "--model shows those of an earlier one" in check(configuration())[1]
    status, output = check(configuration(), "--measure")
    assert status == 1 and "--measure: give a configuration with a head, and its target" in output
    status, output = check(configuration(**static), "--model", str(tiny_target), "--measure")
    assert status == 1 and "nothing to measure; costs: policy 'static' asks for none" in output


@pytest.mark.engine
def test_measured_now(configuration: Any, tiny_target: Path, tiny_head: Path, cache: Path) -> None:
    cost_cache.keep(facts(tiny_target, tiny_head), Costs.from_dict(TABLES))
    command = [sys.executable, "-m", "adaptivespec_vllm.cli", "check", configuration(), "--model", str(tiny_target)]
    # The engine runs in a process of its own, as under `vllm serve`; vLLM's variable for tests leaves out compilation.
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_CI_ENV": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    done = subprocess.run(
        [*command, "--measure", "--json"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)["costs"]
    assert report["source"].startswith("measured now")
    assert report["facts"]["target"] == str(tiny_target)
    costs = Costs.from_dict(report["costs"])
    assert costs != Costs.from_dict(TABLES)
    kept = [kept.costs for kept in cost_cache.find(str(tiny_target), str(tiny_head))]
    assert kept == ([] if "not kept" in report["source"] else [costs])
