"""`adaptivespec demo`: its output for people and for scripts, and one clear message when something fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from adaptivespec_vllm.demo import cli
from adaptivespec_vllm.demo.arms import Arm
from adaptivespec_vllm.demo.decode import Decoder
from adaptivespec_vllm.demo.model import DemoModel
from adaptivespec_vllm.demo.prompts import PROMPTS
from adaptivespec_vllm.runtime import CACHE_VARIABLE


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DemoModel:
    """A process that never restarts, and a model that is there."""
    model = DemoModel(tmp_path / "model", tmp_path / "head")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("adaptivespec_vllm.runtime.enter", lambda reexecute, **more: None)
    monkeypatch.setattr(cli, "prepare_model", lambda cache, progress: (progress("unpacking"), model)[1])
    return model


class FakeEngine:
    """Emits ``chunk`` tokens a step, after a prefill that emits one; the token ids are 0, 1, 2, ..."""

    def __init__(self, chunk: int) -> None:
        self.chunk, self.emitted, self.wanted = chunk, 0, 0

    def add_request(self, request: str, prompt: dict[str, list[int]], parameters: SimpleNamespace) -> None:
        assert prompt["prompt_token_ids"]
        self.emitted, self.wanted = 0, parameters.max_tokens

    def has_unfinished_requests(self) -> bool:
        return self.emitted < self.wanted

    def step(self) -> list[SimpleNamespace]:
        size = min(self.chunk if self.emitted else 1, self.wanted - self.emitted)
        ids = list(range(self.emitted, self.emitted + size))
        self.emitted += size
        print("noise of a library")
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, text="".join(f"<{i}>" for i in ids))])]


class FakeLLM:
    def __init__(self, chunk: int) -> None:
        self.llm_engine = FakeEngine(chunk)
        self.reads = 0

    def get_tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(apply_chat_template=lambda chat, **kw: chat[0]["content"], encode=lambda text, **kw: [1])

    def collective_rpc(self, method: str) -> list[dict[str, float]]:
        assert method == "adaptivespec_stats"
        self.reads += 1
        return [{"steps": 2, "drafted_nodes": 6, "drafted_depth": 4, "drafted_width": 8, "promotions": 1}]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM replaced: plain decoding emits one token a step, every other arm two."""
    vllm, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    sampling.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    monkeypatch.setattr(Arm, "engine", lambda self, model: FakeLLM(1 if self.name == "plain" else 2))


def test_prepare_ends_standard_output_with_json(capfd: pytest.CaptureFixture[str], prepared: DemoModel) -> None:
    cli.run(prepare=True)
    shown = capfd.readouterr()
    assert json.loads(shown.out) == {"model": str(prepared.model), "head": str(prepared.head)}
    assert "unpacking" in shown.err


def test_four_arms_stream_and_end_in_a_table(capfd: pytest.CaptureFixture[str], engines: None, tmp_path: Path) -> None:
    cli.run(tokens=7, json_path=tmp_path / "demo.json")
    out = capfd.readouterr().out
    assert out.count("<0><1><2><3><4><5><6>") == 4 * len(PROMPTS)
    assert "noise" not in out
    assert "noise" in (tmp_path / "cache" / "demo.log").read_text()
    assert all(title in out.split("accepted")[-2] for title in ("plain vLLM", "AdaptiveSpec margin"))
    report = json.loads((tmp_path / "demo.json").read_text())
    lengths = {row["arm"]: row["accepted_length"] for row in report["arms"]}
    assert lengths == {"plain": 1.0, "stock": 2.0, "strict": 2.0, "margin": 2.0}
    assert {row["arm"]: row["nodes"] for row in report["arms"]}["strict"] == 3.0
    assert {row["arm"]: row["same_text"] for row in report["arms"]}["margin"] == len(PROMPTS)
    assert report["provenance"]["settings"]["tokens"] == 7
    assert {"set-up", "decoding"} <= set(report["seconds"])


def test_counters_are_reset_before_each_prompt(engines: None) -> None:
    llm = FakeLLM(2)
    answer = Decoder(llm, counts=True).decode("hello", 5, lambda text, count: None)  # type: ignore[arg-type]
    assert llm.reads == 2  # once to reset, once to read
    assert (answer.tokens, answer.steps, answer.decoded) == ([0, 1, 2, 3, 4], 2, 4)
    assert answer.engine["drafted_nodes"] == 6


def _failing(error: BaseException) -> Callable[..., FakeLLM]:
    def start(self: Arm, model: DemoModel) -> FakeLLM:
        print("the engine said why")
        raise error

    return start


def test_a_failing_engine_shows_cause_log_and_remedy(
    capfd: pytest.CaptureFixture[str], engines: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Arm, "engine", _failing(RuntimeError("no such instruction")))
    with pytest.raises(SystemExit) as caught:
        cli.run(arms="plain")
    assert caught.value.code == 1
    err = capfd.readouterr().err
    assert "RuntimeError: no such instruction" in err
    assert "the engine said why" in err
    assert str(tmp_path / "cache" / "demo.log") in err
    assert "adaptivespec check" in err


@pytest.mark.parametrize(
    ("arms", "error", "said"), [("fast", None, "unknown arm fast"), ("plain", KeyboardInterrupt(), "stopped")]
)
def test_no_traceback_for_a_user_who_erred_or_left(
    capfd: pytest.CaptureFixture[str],
    engines: None,
    monkeypatch: pytest.MonkeyPatch,
    arms: str,
    error: BaseException | None,
    said: str,
) -> None:
    if error is not None:
        monkeypatch.setattr(Arm, "engine", _failing(error))
    with pytest.raises(SystemExit) as caught:
        cli.run(arms=arms)
    assert caught.value.code == 1
    shown = capfd.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.out + shown.err
