"""Two results beside each other: changes with their spread, and a warning for everything that was not alike."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adaptivespec_vllm.bench.cli import run_compare
from adaptivespec_vllm.bench.compare import Comparison, Delta, compare, shown
from adaptivespec_vllm.bench.result import Place
from tests.unit.bench_results import arm, result, sample, two_kinds


def delta(comparison: Comparison, name: str, figure: str, kind: str = "math") -> Delta:
    (found,) = [d for d in comparison.deltas if (d.arm, d.figure, d.kind) == (name, figure, kind)]
    return found


def test_nothing_changed_between_a_result_and_itself() -> None:
    comparison = compare(two_kinds(), two_kinds())
    assert comparison.warnings == []
    assert comparison.deltas and all(d.change.median == 0 and not d.sure for d in comparison.deltas)


def test_changes_are_those_of_the_same_prompts() -> None:
    comparison = compare(two_kinds(), two_kinds(faster=1.1))
    change = delta(comparison, "default", "ratio to plain")
    assert change.paired and change.sure
    assert (change.before, change.after) == pytest.approx((2.25, 2.475))
    assert change.change.median == pytest.approx(0.225)
    assert delta(comparison, "default", "accepted length").change.median == pytest.approx(0.225)
    assert delta(comparison, "default", "ms a step").change.median == pytest.approx(0)
    assert not delta(comparison, "plain", "ratio to plain").sure
    # Over all kinds the prompts differ widely, the changes of each hardly do.
    together = delta(comparison, "default", "ratio to plain", "all").change
    assert 0.13 <= together.low <= together.median <= together.high <= 0.23


def test_other_prompts_are_not_paired() -> None:
    arms = [arm("plain"), arm("default", "policy")]
    first = result([sample("plain", 10), sample("default", 20)], arms)
    second = result([sample("plain", 10, prompts=["x"]), sample("default", 30, prompts=["x"])], arms)
    change = delta(compare(first, second), "default", "ratio to plain")
    assert not change.paired
    assert change.change.median == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": {"dtype": "bfloat16"}}, "dtype: float32 and bfloat16"),
        ({"settings": {"mode": "compiled"}}, "mode: eager and compiled"),
        ({"settings": {"threads": 8}}, "threads: 2 and 8"),
        ({"settings": {"model": "other 99"}}, "model: target 0123 and other 99"),
        ({"settings": {"prompts": "abc"}}, "prompts: (not said) and abc"),
        ({"provenance": {"machine": {"cpu": "another"}}}, "machine cpu: a processor and another"),
        ({"provenance": {"versions": {"torch": "3"}}}, "version torch: 2 and 3"),
        ({"complete": False}, "the second run was stopped before its end"),
        ({"warnings": ["the machine was busy"]}, "the second run: the machine was busy"),
    ],
)
def test_everything_unlike_is_warned_of(changes: dict[str, Any], said: str) -> None:
    first = two_kinds()
    for name in ("settings", "provenance"):
        if name in changes:
            changes = {**changes, name: {**getattr(first, name), **changes[name]}}
    assert compare(first, two_kinds(**changes)).warnings == [said]


def test_when_and_by_whom_it_ran_is_no_warning() -> None:
    first = two_kinds()
    machine = {**first.provenance["machine"], "load_average": [9.9]}
    other = {**first.provenance, "machine": machine, "time": "later", "commit": "abc", "command": ["x"]}
    assert compare(first, two_kinds(provenance=other)).warnings == []


def test_what_only_one_of_them_has_is_named() -> None:
    arms = [arm("plain"), arm("default", "policy")]
    first = result([sample("plain", 10), sample("default", 20)], arms)
    second = result([sample("plain", 10)], arms[:1])
    comparison = compare(first, second, ("a.json", "b.json"))
    assert comparison.warnings == ["not in b.json: arms default"]
    assert {d.arm for d in comparison.deltas} == {"plain"}


def test_places_that_only_one_of_them_has_are_named() -> None:
    arms = [arm("plain"), arm("default", "policy")]
    both = [sample("plain", 10), sample("default", 20)]
    place = Place(batch=8, context=64)
    first = result([*both, sample("plain", 10, place=place), sample("default", 20, place=place)], arms)
    comparison = compare(first, result(both, arms), ("a.json", "b.json"))
    assert comparison.warnings == ["not in b.json: math, batch 8, context of 64"]


def test_the_table_shows_before_after_and_the_interval() -> None:
    stream = io.StringIO()
    comparison = compare(two_kinds(), two_kinds(faster=1.2, warnings=["slow disk"]), ("a.json", "b.json"))
    Console(file=stream, width=90).print(shown(comparison))
    text = stream.getvalue()
    assert "a.json → b.json" in text
    assert "warning: the second run: slow disk" in text
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("default"))
    assert "2.25 → 2.70" in lines[first] and "100.00 → 100.00" in lines[first]
    assert "+0.45 (+0.45 to +0.45)" in lines[first + 1]


def test_the_command_reads_files_and_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b").mkdir()
    path = two_kinds().write(tmp_path)
    two_kinds(faster=2.0).write(tmp_path / "b")
    run_compare(path, tmp_path / "b", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert {d["figure"] for d in found["deltas"]} == {"ratio to plain", "accepted length", "ms a step"}
    assert found["warnings"] == []
