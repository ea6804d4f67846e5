"""Only for tests: vLLM's Ray executor on CPUs, which it refuses because its CPU platform names no resource of Ray's.

First on the path, this runs in every process: the platform says that a rank takes a "GPU", of which the tests' Ray
counts two that do not exist. Everything else of the executor, its actors and its workers is as ever.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder:
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "vllm.platforms.cpu":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            module.CpuPlatform.ray_device_key = "GPU"  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
