"""The process of our commands: environment, a single restart for the OpenMP runtime, one cache directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from adaptivespec_vllm import runtime

OPENMP = Path("/opt/env/lib/libiomp5.so")


@pytest.fixture
def openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "intel_openmp", lambda: OPENMP)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    replaced: dict[str, str] = {"PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "4"}
    monkeypatch.setattr(os, "environ", replaced)
    return replaced


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, env: calls.append((argv, env)))
    return calls


def test_what_the_user_set_stays(openmp: None) -> None:
    result = runtime.completed({"OMP_NUM_THREADS": "7", "LD_PRELOAD": "/lib/libtcmalloc.so"})
    assert result["OMP_NUM_THREADS"] == "7"
    assert result["LD_PRELOAD"] == f"{OPENMP}:/lib/libtcmalloc.so"
    assert result["TOKENIZERS_PARALLELISM"] == "false"
    assert "HF_HUB_OFFLINE" not in result  # only where it is asked for: models may have to be fetched
    assert runtime.completed({"HF_HUB_OFFLINE": "0"}, HF_HUB_OFFLINE="1", X="2")["HF_HUB_OFFLINE"] == "0"
    assert runtime.completed({}, HF_HUB_OFFLINE="1")["HF_HUB_OFFLINE"] == "1"


def test_another_openmp_of_intel_is_kept(openmp: None) -> None:
    assert runtime.completed({"LD_PRELOAD": "/usr/lib/libiomp5.so"})["LD_PRELOAD"] == "/usr/lib/libiomp5.so"


def test_without_the_library_nothing_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "intel_openmp", lambda: None)
    assert "LD_PRELOAD" not in runtime.completed({})


def test_the_command_restarts_once_with_its_own_arguments(
    openmp: None,
    environment: dict[str, str],
    executed: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "adaptivespec_vllm.cli", "demo", "--tokens", "8"])
    runtime.enter(reexecute=True)
    ((argv, second),) = executed
    assert argv == [sys.executable, "-m", "adaptivespec_vllm.cli", "demo", "--tokens", "8"]
    assert second["LD_PRELOAD"] == str(OPENMP)

    # The second process: had the linker dropped the variable, it would still not start a third.
    environment.clear()
    environment.update({k: v for k, v in second.items() if k != "LD_PRELOAD"})
    runtime.enter(reexecute=True)
    assert len(executed) == 1
    assert set(second) - set(environment) == {runtime._REEXECUTED, "VLLM_CPU_KVCACHE_SPACE"}


def test_preparing_needs_no_restart(openmp: None, environment: dict[str, str], executed: list[object]) -> None:
    runtime.enter(reexecute=False)
    assert executed == []
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment  # it would win over the cache size of each engine


def test_threads_are_physical_cores_this_process_may_use() -> None:
    assert 1 <= runtime.physical_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("load", "said"), [(2.5, None), (3.5, 3.5)])
def test_a_machine_with_other_work_is_noticed(monkeypatch: pytest.MonkeyPatch, load: float, said: float | None) -> None:
    monkeypatch.setattr(runtime, "physical_cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0))
    assert runtime.busy() == said


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(runtime.CACHE_VARIABLE, str(tmp_path))
    assert runtime.cache_dir() == tmp_path
    monkeypatch.delenv(runtime.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runtime.cache_dir() == tmp_path / ".cache" / "adaptivespec"
