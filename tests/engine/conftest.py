"""A tiny target and its head, and the plugin in this process.

vLLM remembers environment variables once an engine ran in this process; these tests set them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plugin_models import write_head, write_target


@pytest.fixture(autouse=True)
def _fresh_environment() -> None:
    from vllm import envs

    envs.disable_envs_cache()


@pytest.fixture(scope="module")
def registered() -> None:
    from adaptivespec_vllm import plugin

    plugin.register()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def options(head: str) -> dict[str, Any]:
    return {"method": "adaptivespec", "model": head, "margin": {"kappa": 0.3}, "enforce_eager": True}


@pytest.fixture(scope="module")
def parser(registered: None) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.fixture
def file(tmp_path: Path, options: dict[str, Any]) -> Path:
    path = tmp_path / "adaptivespec.json"
    path.write_text(json.dumps(options, indent=2))
    return path
