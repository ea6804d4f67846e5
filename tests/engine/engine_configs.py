"""Engine configurations of real vLLM; no engine is started."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform

CPU_ONLY = pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU worker is asked for")


def engine_config(target: str, speculative_config: Any = None, **kwargs: Any) -> Any:
    """vLLM's whole configuration, from arguments in Python."""
    settings = {"dtype": "float32", "max_model_len": 256} | kwargs
    return EngineArgs(model=target, speculative_config=speculative_config, **settings).create_engine_config()


def from_command_line(parser: Any, target: str, *argv: str) -> Any:
    """The same, from the command line."""
    arguments = parser.parse_args(["--model", target, "--dtype", "float32", "--max-model-len", "256", *argv])
    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
