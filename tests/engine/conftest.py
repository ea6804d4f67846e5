"""vLLM remembers environment variables once an engine ran in this process; these tests set them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fresh_environment() -> None:
    from vllm import envs

    envs.disable_envs_cache()
