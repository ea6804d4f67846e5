"""Real vLLM engines, in this process (so that tests can look inside), shared between tests."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ADAPTIVESPEC_CHECK", "1")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over kv_cache_memory_bytes, for every engine

from tests.e2e import tiny

Prompt = dict[str, list[int]]

_ENGINES: list[Any] = []
"""Engines live as long as the session: one that is collected tears down the process groups that all of them share."""


ON_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""The tests run on the V2 model runner, with Triton's interpreter (``test_v2.py``)."""

AHEAD = os.environ.get("TEST_ASYNC_SCHEDULING") == "1"
"""Besides, engines schedule a step before the one before it is known."""


@pytest.fixture(scope="session", autouse=True)
def interpreted_kernels() -> None:
    """Where kernels are interpreted, those that cannot be have twins in torch."""
    if ON_V2:
        from tests.e2e import interpreted

        interpreted.replace_kernels()
    if AHEAD:
        schedule_ahead(pytest.MonkeyPatch())


def schedule_ahead(patch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on schedule asynchronously, which vLLM turns off on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def keep_asynchronous(cls: type, vllm_config: Any) -> None:
        stock(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_asynchronous))


def scaled(tokens: int) -> int:
    """Tokens to decode: half of them where every kernel is interpreted."""
    return tokens // 2 if ON_V2 else tokens


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_head(tmp_path_factory.mktemp("tiny") / "head")


@pytest.fixture(scope="session")
def tiny_speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, for what needs text."""
    return tiny.add_tokenizer(tiny.make_target(tmp_path_factory.mktemp("tiny") / "speaker"))


@pytest.fixture(scope="session")
def make_llm(tiny_target: Path) -> Callable[..., Any]:
    def make(target: Path | None = None, **overrides: Any) -> Any:
        from vllm import LLM

        settings: dict[str, Any] = {
            "model": str(target or tiny_target),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 16 << 20,
            "enable_prefix_caching": True,
            "seed": 0,
            "block_size": 32,
        }
        llm = LLM(**(settings | overrides))
        _ENGINES.append(llm)
        return llm

    return make


def adaptivespec(head: Path, **sections: Any) -> dict[str, Any]:
    """A speculative config of ours; a large static tree unless told otherwise (oracles draft what they like)."""
    shape = {"depth": 6, "width": 8, "nodes": 12}
    return {"method": "adaptivespec", "model": str(head), "tree": {"policy": "static", "shape": shape}} | sections


def random_prompts(count: int, seed: int = 0, shortest: int = 4, longest: int = 60) -> list[Prompt]:
    rng = random.Random(seed)
    return [
        {"prompt_token_ids": [rng.randrange(3, tiny.VOCABULARY) for _ in range(rng.randint(shortest, longest))]}
        for _ in range(count)
    ]


def greedy(tokens: int, **overrides: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        **({"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False} | overrides)
    )


def generate(llm: Any, prompts: list[Prompt], params: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def truth_of(prompts: list[Prompt], tokens: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p["prompt_token_ids"]): t for p, t in zip(prompts, tokens, strict=True)}


@pytest.fixture(scope="session")
def plain(make_llm: Callable[..., Any]) -> Any:
    """Plain vLLM on the tiny target."""
    return make_llm()


@pytest.fixture(scope="session")
def trees(make_llm: Callable[..., Any], tiny_head: Path) -> Any:
    """AdaptiveSpec, strict, on the tiny target."""
    return make_llm(speculative_config=adaptivespec(tiny_head))
