"""An installed plugin that nobody asked for changes nothing of vLLM that can be seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.demo.model import prepare
from adaptivespec_vllm.runtime import cache_dir
from tests.e2e import stock_vllm, tiny

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not any(entry.name == "adaptivespec" for entry in entry_points(group="vllm.general_plugins")),
    reason="the package is not installed, so vLLM does not find the plugin",
)


def run(command: list[str], *, plugin: bool) -> str:
    """Standard output of a command that vLLM's plugins take part in, or not."""
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    environment |= {} if plugin else {"VLLM_PLUGINS": ""}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Tiny models that understand the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("stock")
    demo = prepare(cache_dir(), lambda message: None)
    vocabulary = json.loads((demo.model / "config.json").read_text())["vocab_size"]
    target = tiny.make_target(folder / "target", vocabulary=vocabulary)
    for file in demo.model.glob("*token*"):
        shutil.copy(file, target)
    return str(target), str(tiny.make_head(folder / "head", vocabulary=vocabulary))


def test_answers_engines_and_metrics(models: tuple[str, str]) -> None:
    """Plain decoding and vLLM's own EAGLE-3: texts, tokens, log-probabilities, configuration, names of metrics."""
    command = [sys.executable, "-m", stock_vllm.__name__, *models]
    found: list[dict[str, Any]] = [json.loads(run(command, plugin=plugin).splitlines()[-1]) for plugin in (True, False)]
    assert [result.pop("plugin") for result in found] == [True, False]
    assert found[0]["answers"] == found[1]["answers"]
    assert found[0]["metrics"] == found[1]["metrics"]
    assert len(found[0]["metrics"]) > 20
    structured = found[0]["answers"]["plain, structured"]
    assert all(text in ("yes", "no", "perhaps") for text, *_ in structured)


def test_help_of_vllm_serve() -> None:
    """One word more: the method that can be asked for."""
    vllm = str(Path(sys.executable).with_name("vllm"))
    ours, stock = (run([vllm, "serve", "--help=all"], plugin=plugin) for plugin in (True, False))
    assert ours.replace(",adaptivespec}", "}") == stock
    assert len(stock.splitlines()) > 1000
