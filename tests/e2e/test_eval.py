"""`adaptivespec eval` with real engines: a run that is killed goes on, and what it counts is what the worker counts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adaptivespec_vllm.bench import arms
from adaptivespec_vllm.bench.engines import Engine
from adaptivespec_vllm.eval.answers import FILE
from adaptivespec_vllm.eval.result import Result
from adaptivespec_vllm.eval.session import Inputs, Session
from adaptivespec_vllm.eval.tasks import Gsm8k, Prompts
from tests.e2e import conftest

LOSSY = "tree:3,4,6@0.0001"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i} and then {i + 1}"}) + "\n" for i in range(200)))
    return path


def command(target: Path, head: Path, prompts: Path, output: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "adaptivespec_vllm.cli", "eval", "--model", str(target), "--head", str(head)),
        *("--arms", f"plain {LOSSY}", "--prompts", str(prompts), "--max-tokens", "12", "--batch", "8"),
        *("--threads", "1", "--output", str(output)),
    ]


def test_a_run_that_is_killed_goes_on(tiny_speaker: Path, tiny_head: Path, prompts: Path, tmp_path: Path) -> None:
    run = command(tiny_speaker, tiny_head, prompts, tmp_path)
    file = tmp_path / FILE
    before: list[bytes] = []
    for wanted in (40, 260):  # in the middle of the first arm, then of the second
        with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            deadline = time.monotonic() + 240
            while process.poll() is None and time.monotonic() < deadline:
                if file.exists() and file.read_bytes().count(b"\n") >= wanted:
                    break
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        lines = file.read_bytes().splitlines(keepends=True)
        assert wanted <= len(lines) < 400
        assert lines[: len(before)] == before  # nothing was asked again
        before = [line for line in lines if line.endswith(b"\n")]
        file.write_bytes(file.read_bytes() + b'{"arm": "plain", "task": "pro')  # as if it was killed while it wrote
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = file.read_bytes().splitlines(keepends=True)
    assert lines[: len(before)] == before
    keys = [(row["arm"], row["id"]) for row in map(json.loads, lines)]
    assert sorted(keys) == sorted((arm, str(i + 1)) for arm in ("plain", LOSSY) for i in range(200))
    result = Result.model_validate_json((tmp_path / "eval.json").read_text())
    assert result.complete
    assert {(row.arm, row.n) for row in result.figures} == {("plain", 200), (LOSSY, 200)}
    assert result.provenance["versions"]
    assert "prompts, 200 prompts" in (tmp_path / "report.txt").read_text()
    other = subprocess.run([*run, "--seed", "3"], capture_output=True, text=True, timeout=120)
    assert other.returncode == 2
    assert "a run with the same seed" in other.stderr


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """What the workers counted, by arm: the run reads their counters batch by batch."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    stock = Engine.counters

    def counters(engine: Engine) -> dict[str, Any]:
        told = stock(engine)
        totals[engine.arm.name].update({name: told.get(name, 0) for name in ("promotions", "regret", "steps")})
        return told

    monkeypatch.setattr(Engine, "counters", counters)
    return totals


def test_what_it_counts_is_what_the_worker_counts(
    tiny_speaker: Path, tiny_head: Path, tmp_path: Path, counted: dict[str, Counter[str]]
) -> None:
    questions = tmp_path / "questions.jsonl"
    rows = [{"question": f"what is {i} and {i}?", "answer": str(2 * i)} for i in range(12)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"instruction": "say a"}\n{"instruction": "say b"}\n')
    inputs = Inputs(
        model=str(tiny_speaker),
        head=str(tiny_head),
        arms=arms.parse(f"tree:3,4,6 {LOSSY}", str(tiny_head)),
        tasks=[Gsm8k(questions), Prompts(texts)],
        limit=10,
        batch=4,
        tokens=24,
        temperature=0.0,
        dtype="float32",
        eager=True,
        seed=0,
    )
    output = tmp_path / "run"
    output.mkdir()
    session = Session.open(inputs, output, Console(quiet=True))
    session.run()
    conftest._ENGINES.extend(session.engines)
    session.close()
    for name in ("tree:3,4,6", LOSSY):
        answers = [answer for (arm, _, _), answer in session.answers.rows.items() if arm == name]
        losses = [nats for answer in answers for _, nats in answer.losses]
        # A step may go past the end of an answer: the worker counts what is cut off too.
        assert len(losses) <= counted[name]["promotions"] <= len(losses) + 3 * len(answers)
        assert sum(losses) <= counted[name]["regret"] + 1e-3
        assert sum(answer.steps for answer in answers) == pytest.approx(counted[name]["steps"] - len(answers))
        if name == LOSSY:
            assert len(losses) > 20
            assert max(losses) < 9.3  # ln 10,000
        else:
            assert losses == []
    figures = {(row.task, row.arm): row for row in session.result.figures}
    assert {key[0] for key in figures} == {"gsm8k", "prompts"}
    strict, lossy = figures["gsm8k", "tree:3,4,6"], figures["gsm8k", LOSSY]
    assert (strict.n, strict.fidelity.same, strict.fidelity.promoted) == (10, 1.0, 0.0)
    assert lossy.accepted_length > strict.accepted_length >= 1.0 == figures["gsm8k", "plain"].accepted_length
    assert lossy.fidelity.same < 1.0 and lossy.fidelity.promoted > 0.05
    assert figures["prompts", LOSSY].accuracy is None
    assert any("too few to lose any" in warning for warning in session.result.warnings)
