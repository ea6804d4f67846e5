"""`adaptivespec bench` as a user meets it: what it writes, how it stops, what it says when something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from adaptivespec_vllm import runtime
from adaptivespec_vllm.bench import cli, measure, plots, session
from adaptivespec_vllm.bench.arms import Arm
from adaptivespec_vllm.bench.engines import Engine, Server
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.prompts import Encoded
from adaptivespec_vllm.bench.result import Place, Result
from tests.unit.bench_engines import FakeLLM

SERVER = Server("target", "float32", True, 256, 2, 2048, 1 << 20)


@pytest.fixture(autouse=True)
def entered(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A process that never restarts, on a machine that nobody else uses."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(runtime, "enter", lambda **options: calls.append(options))
    monkeypatch.setattr(runtime, "busy", lambda: None)
    return calls


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and engines replaced."""

    def prepare(self: session.Session) -> tuple[session.Plan, Server]:
        self.result.settings = {"model": "target 0123"}
        prompts = [[Encoded(f"{kind}/0", kind, (1, 2))] for kind in ("math", "code")]
        return {Place(batch=1, context=None): prompts}, SERVER

    def start(cls: type[Engine], arm: Arm, server: Server, engines: int = 1) -> Engine:
        print("noise of a library")
        return cls.of(arm, FakeLLM(1 if arm.name == "plain" else 2))

    def draw(result: Result, directory: Path) -> list[Path]:
        (directory / "ratio.png").touch()
        return [directory / "ratio.png"]

    monkeypatch.setattr(plots, "available", lambda: True)
    monkeypatch.setattr(plots, "draw", draw)
    monkeypatch.setattr(session.Session, "_prepare", prepare)
    monkeypatch.setattr(Engine, "start", classmethod(start))
    monkeypatch.setattr(measure, "sampling", lambda temperature, seed, **more: lambda number, tokens: tokens)


def bench(output: Path, **options: Any) -> int:
    """Run; returns the exit status."""
    defaults: dict[str, Any] = {"model": "org/target", "head": "org/head", "arms": "stock:1 default@0.2", "repeats": 2}
    with pytest.raises(typer.Exit) as caught:
        cli.run(output=output, **(defaults | options))
    return caught.value.exit_code


def test_everything_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, max_tokens=8) == 0
    out = capfd.readouterr().out
    result = Result.read(tmp_path)
    assert result.complete and result.warnings == []
    assert [arm.name for arm in result.arms] == ["plain", "stock:1", "default@0.2"]
    assert len(result.samples) == 3 * 2 * 2  # arms, prompts, repeats
    assert result.provenance["command"] and result.memory["peak_resident_bytes"] > 0
    (trace,) = result.traces  # of the arm of ours
    assert (trace.arm, trace.prompt, trace.emitted) == ("default@0.2", "math/0", 8)
    assert [token.text for token in trace.steps[1].tokens] == [" 1001", " 1002"]
    assert "noise" not in out and "noise" in (tmp_path / cli.LOG).read_text()
    assert "times as fast as the best" in out
    assert "times as fast as the best" in (tmp_path / cli.REPORT).read_text()
    assert "result.json, report.txt, ratio.png" in " ".join(out.split())


def interrupted(after: int, error: BaseException) -> Callable[..., Any]:
    original, turns = measure.take, iter(range(1000))

    def take(*args: Any) -> Any:
        if next(turns) == after:
            raise error
        return original(*args)

    return take


def test_what_was_measured_is_kept_when_the_user_leaves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "take", interrupted(3, KeyboardInterrupt()))
    assert bench(tmp_path) == 130
    result = Result.read(tmp_path)
    assert not result.complete and len(result.samples) == 3 * 3 and result.figures
    shown = capfd.readouterr()
    assert "stopped" in shown.err and "stopped before its end" in shown.out
    assert "Traceback" not in shown.out + shown.err


def test_the_result_is_written_turn_by_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        """What no handler catches."""

    monkeypatch.setattr(measure, "take", interrupted(2, Killed()))
    with pytest.raises(Killed):
        cli.run(model="org/target", head="org/head", arms="stock:1", output=tmp_path)
    assert len(Result.read(tmp_path).samples) == 2 * 2


def test_an_engine_that_fails_is_named_with_cause_and_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(cls: type[Engine], arm: Arm, server: Server, engines: int = 1) -> Engine:
        print("the engine said why")
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(Engine, "start", classmethod(start))
    assert bench(tmp_path) == 1
    err = capfd.readouterr().err
    assert "arm 'plain' did not start: RuntimeError: no such instruction" in err
    assert "the engine said why" in err and str(tmp_path / cli.LOG) in err
    assert "Traceback" not in err and "Traceback" in (tmp_path / cli.LOG).read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arms": "fast"}, '--arms: got "fast"; allowed: plain'),
        ({"batch": "x"}, '--batch: got "x"; allowed: integers'),
        ({"threads": 0}, "--threads: got 0; allowed: an integer from 1 to 1024"),
        ({"head": None}, "--head: got nothing"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: dict[str, Any], said: str
) -> None:
    assert bench(tmp_path / "out", **options) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"bench: {said}") and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_read_is_bad_input() -> None:
    with (
        pytest.raises(BadInput, match=r'^--model: got "org/x"; allowed: a model \(OSError: no network\)$'),
        session.reading("--model", "org/x", "a model"),
    ):
        raise OSError("no network")


def test_a_busy_machine_is_noted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "busy", lambda: 7.5)
    assert bench(tmp_path) == 0
    (warning,) = Result.read(tmp_path).warnings
    assert "busy" in warning and "7.5" in warning
    assert capfd.readouterr().out.count("load average 7.5") == 2  # at once, and in the report


def test_plots_are_optional(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    assert bench(tmp_path) == 0
    assert "pip install 'adaptivespec-vllm[bench]'" in capfd.readouterr().out
    assert list(tmp_path.glob("*.png")) == []


def test_threads_are_set_before_anything_is_imported(tmp_path: Path, entered: list[dict[str, Any]]) -> None:
    assert bench(tmp_path, threads=3) == 0
    assert entered == [{"reexecute": True, "threads": 3}]


def test_compare_says_what_it_cannot_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        cli.run_compare(tmp_path / "a.json", tmp_path / "b.json")
    assert caught.value.exit_code == 2
    err = capfd.readouterr().err
    assert err.startswith("compare: result: got ") and err.count("\n") == 1
