"""`adaptivespec simulate` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from adaptivespec_vllm.cli import app
from adaptivespec_vllm.simulate import plots
from adaptivespec_vllm.simulate.figures import FACTORS
from tests.unit.recordings import random_recording


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    random_recording(tmp_path / "r.npz", levels=3)
    return tmp_path / "r.npz"


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_a_table_for_every_batch_size(recorded: Path) -> None:
    result = simulate("--recording", recorded, "--batch", "1,2", "--arms", "stock:1-2 default:3,4,9")
    assert result.exit_code == 0, result.output
    for said in ("batch 1", "batch 2", "plain", "stock:2", "default:3,4,9", "accepted", "Costs: a100-8b", "25 tokens"):
        assert said in result.output
    assert "best static tree" not in result.output


def test_a_search_names_the_best(recorded: Path) -> None:
    result = simulate(
        "--recording", recorded, "--search", "--arms", "tree:2,2,3", "--kinds", "a", "--costs", "cpu-2core"
    )
    assert result.exit_code == 0, result.output
    assert "a: best chain of" in result.output and "times as fast as the best" in result.output
    assert "b:" not in result.output


def test_json_alone_on_standard_output(recorded: Path) -> None:
    result = simulate(
        "--recording", recorded, "--json", "--search", "--arms", "stock:1 default:3,3,6", "--batch", "1,3"
    )
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["costs"]["name"] == "a100-8b" and content["costs"]["target"][0] == [1, 0.0113]
    assert content["recording"] == {"target": "by hand", "head": "by hand", "kinds": ["a", "b"], "texts": 4}
    one, three = content["batches"]
    assert (one["batch"], three["batch"]) == (1, 3)
    assert one["arms"]["plain"]["all"]["vs_plain"] == pytest.approx(1)
    assert len(one["best_tree"]["all"]["shape"]) == 3
    assert content["choices"] == {}


def test_the_choice_by_cost_is_drawn(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    directory = tmp_path / "new" / "plots"
    result = simulate("--recording", recorded, "--arms", "default:3,3,6", "--plots", directory, "--json")
    assert result.exit_code == 0, result.output
    assert (directory / plots.NAME).stat().st_size > 10_000
    panels = json.loads(result.stdout)["choices"]
    assert [[choice["factor"] for choice in panel] for panel in panels.values()] == [list(FACTORS)] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--costs", "h100"], '--costs: got "h100"; allowed: a100-8b, cpu-2core'),
        (["--recording", "nowhere.npz"], '--recording: got "nowhere.npz"; allowed: a file that'),
        (["--arms", "fast"], '--arms: got "fast"; allowed: plain'),
        (["--arms", "default@0.2"], "allowed: arms without the margin rule"),
        (["--arms", "tree:2,12,30"], "a width up to 8"),
        (["--kinds", "poems"], '--kinds: got "poems"; allowed: kinds of the recording: math, code, chat'),
        (["--kinds", ","], "--kinds: got"),
        (["--batch", "0"], '--batch: got "0"; allowed: integers from 1 to 256'),
        (["--batch", "1,x"], '--batch: got "1,x"'),
        (["--arms", "plain stock:2", "--plots", "."], '--plots: got "."; allowed: a directory, with a cost-aware arm'),
        (["--plots", "/proc/plots"], '--plots: got "/proc/plots"; allowed: a directory that can be written'),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr and result.stderr.startswith("simulate: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""
