"""vLLM's Ray executor with two ranks on one machine's CPUs; see ``ray_on_cpu`` for what makes it take CPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import adaptivespec_vllm
from tests.e2e import ray_ranks
from tests.e2e.conftest import generate, greedy

pytest.importorskip("ray")

HERE = Path(__file__).parent
PACKAGE = Path(adaptivespec_vllm.__file__).parent


def run(folder: Path, *arguments: object) -> dict[str, Any]:
    """What the script says, run in ``folder``, which Ray puts on its workers' path."""
    paths = [str(HERE / "ray_on_cpu"), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, str(HERE / "ray_ranks.py"), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        timeout=400,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"') and '"asctime"' not in line]
    assert lines, result.stdout[-3000:]
    return dict(json.loads(lines[-1]))


def test_two_actors_decode_the_text_of_one_process(
    tiny_target: Path, tiny_head: Path, tmp_path: Path, plain: Any
) -> None:
    found = run(tmp_path, tiny_target, tiny_head)
    assert "error" not in found, found
    prompts = [{"prompt_token_ids": ids} for ids in ray_ranks.PROMPTS]
    assert found["tokens"] == generate(plain, prompts, greedy(ray_ranks.TOKENS))
    first, second = found["drafted"]
    assert first == second > 0
    assert found["variables"] == ["set", "set"]


def test_a_node_with_another_version_is_refused_by_name(tiny_target: Path, tiny_head: Path, tmp_path: Path) -> None:
    copy = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    source = copy / "__init__.py"
    text = re.sub(r'__version__ = ".*"', '__version__ = "9.9.9"', source.read_text())
    source.write_text(text)
    error = run(tmp_path, tiny_target, tiny_head, tmp_path)["error"]
    assert "RanksDiffer" in error
    assert f"adaptivespec_vllm: '{adaptivespec_vllm.__version__}' in the process that started the engine" in error
    assert "'9.9.9' in this worker on " in error
