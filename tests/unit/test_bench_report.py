"""How a result is shown: tables, notes, plots."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from adaptivespec_vllm.bench import plots
from adaptivespec_vllm.bench.report import report
from adaptivespec_vllm.bench.result import Place, Result
from tests.unit.bench_results import arm, result, sample, two_kinds


def shown(made: Result, width: int = 110) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(report(made))
    return stream.getvalue()


def row(text: str, table: str, name: str) -> list[str]:
    """Cells of an arm's row in the table whose heading begins with ``table``."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(table))
    return next(line.split() for line in lines[start:] if line.split()[:1] == [name])


def test_one_row_an_arm_with_its_figures() -> None:
    text = shown(two_kinds())
    assert row(text, "arm", "tree:5,4,8") == [
        *("tree:5,4,8", "16.5", "1.65x", "0.80–2.50", "2.50x", "0.80x", "1.65", "2.0/1.5/3.0", "0", "100.0", "4/4")
    ]
    assert row(text, "arm", "tree:3,4,3@0.2")[-3:] == ["28", "100.0", "0/4"]
    assert row(text, "arm", "plain")[2:6] == ["1.00x", "–", "1.00x", "1.00x"]
    assert "…" not in text  # nothing is cut at 110 columns


def test_the_best_are_named_for_each_kind_with_ours_beside_them() -> None:
    text = shown(two_kinds())
    assert "math: best stock chain stock:2 (1.50x plain), best static tree tree:5,4,8 (2.50x plain)" in text
    assert "code: best stock chain stock:1 (1.10x plain), best static tree tree:3,4,3 (1.20x plain)" in text
    assert row(text, "times as fast", "default")[1:5] == ["1.50x", "0.90x", "1.20x", "1.10x"]
    assert row(text, "times as fast", "tree:3,4,3@0.2")[-1] == "1.25x"  # of 1.5 on math and 1 on code


def test_where_a_step_goes_and_how_deep_paths_are_accepted() -> None:
    text = shown(two_kinds())
    assert row(text, "ms of an engine step", "default") == ["default", "30.00", "10.00", "5.00", "55.00", "100.00"]
    assert row(text, "accepted at depth", "stock:2") == ["stock:2", "50%", "10%"]


def test_what_a_reader_has_to_know() -> None:
    text = " ".join(shown(two_kinds(complete=False, warnings=["the machine was busy"])).split())
    assert "stopped before its end" in text
    assert "warning: the machine was busy" in text
    assert "lossy" in text
    assert "times on the host" not in text
    strict = " ".join(shown(result([sample("plain", 10)], [arm("plain")], settings={"device": "cuda"})).split())
    assert "lossy" not in strict and "stopped" not in strict
    assert "times on the host" in strict


def test_every_place_has_its_own_tables() -> None:
    places = [Place(batch=b, context=c) for b in (1, 4) for c in (64, 512)]
    samples = [sample(name, n, place=place) for place in places for name, n in (("plain", 10), ("default", 15))]
    text = shown(result(samples, [arm("plain"), arm("default", "policy")]))
    assert all(text.count(f"{place.title()}\n") == 1 for place in places)


def test_pictures_of_everything(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert sorted(path.name for path in plots.draw(two_kinds(), tmp_path)) == [
        "accepted-and-cost.png",
        "ratio.png",
        "time-split.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_every_arm_is_inside_the_picture_of_costs() -> None:
    pytest.importorskip("matplotlib")
    samples = [
        sample("plain", 100, 10.0),
        sample("a", 400, 10.0, engine_steps=150),
        sample("b", 400, 40.0, engine_steps=200),
    ]
    made = result(samples, [arm("plain"), arm("a", "policy"), arm("b", "policy")])
    (axes,) = plots.accepted_and_cost(made, made.places()[0]).axes
    points = [line.get_xydata()[0] for line in axes.lines if line.get_linestyle() == "None"]
    assert len(points) == 3
    assert all(axes.viewLim.contains(x, y) for x, y in points)


def test_several_batch_sizes_are_drawn_apart_and_along_each_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    places = [Place(batch=1, context=None), Place(batch=8, context=None)]
    samples = [sample(name, n, place=place) for place in places for name, n in (("plain", 10), ("default", 15))]
    names = {path.stem for path in plots.draw(result(samples, [arm("plain"), arm("default", "policy")]), tmp_path)}
    assert names == {f"{what}-batch{b}" for what in ("ratio", "time-split", "accepted-and-cost") for b in (1, 8)} | {
        "ratio-by-batch"
    }


def test_pictures_say_when_the_machine_was_busy() -> None:
    pytest.importorskip("matplotlib")
    quiet, busy = two_kinds(), two_kinds(warnings=["the machine was busy at the start"])
    titles = [plots.ratio(made, made.places()[0]).get_suptitle() for made in (quiet, busy)]
    assert ["BUSY" in title for title in titles] == [False, True]
    assert "target, float32, eager, a processor, 2 threads" in titles[0]
