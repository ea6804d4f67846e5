"""`adaptivespec eval` as a user meets it before any engine starts: what it says when something is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from adaptivespec_vllm import runtime
from adaptivespec_vllm.eval import cli
from adaptivespec_vllm.eval.session import Session


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is not restarted; whoever comes as far as to run stops there."""

    def run(self: Session) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "enter", lambda **options: None)
    monkeypatch.setattr(Session, "run", run)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "Hello"}\n')
    return path


def evaluate(output: Path, **options: Any) -> int:
    """Run; returns the exit status."""
    with pytest.raises(typer.Exit) as caught:
        cli.run(output=output, **({"model": "org/target", "head": "org/head"} | options))
    return caught.value.exit_code


def test_a_stop_is_said_how_to_go_on_from(tmp_path: Path, questions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate(tmp_path / "run", prompts=questions) == 130
    assert "the same options and --output go on" in capfd.readouterr().err
    assert (tmp_path / "run" / "settings.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompts": None}, "at least one file of questions, by --gsm8k, --humaneval, --math, --prompts"),
        ({"gsm8k": Path("/nowhere.jsonl")}, "--gsm8k: got"),
        ({"arms": "fast"}, '--arms: got "fast"'),
        ({"head": None}, "--head: got nothing"),
        ({"model": "/nowhere/target"}, "--model: got"),
        ({"limit": 0}, "--limit: got 0"),
        ({"batch": 0}, "--batch: got 0"),
        ({"max_tokens": 0}, "--max-tokens: got 0"),
        ({"temperature": 3.0}, "--temperature: got 3.0"),
        ({"dtype": "int4"}, '--dtype: got "int4"'),
        ({"threads": 0}, "--threads: got 0"),
        ({"seed": -1}, "--seed: got -1"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, questions: Path, options: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path / "run", **({"prompts": questions} | options)) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_directory_of_another_run(tmp_path: Path, questions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate(tmp_path / "run", prompts=questions) == 130
    assert evaluate(tmp_path / "run", prompts=questions, max_tokens=7) == 2
    assert "a run with the same max_tokens" in capfd.readouterr().err
