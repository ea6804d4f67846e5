"""Lets vLLM's V2 model runner start on a CPU, for tests: Triton kernels run in Triton's interpreter.

Python imports this module in every process that has this folder on its path, before vLLM looks for Triton's backends.
"""

import os
from types import SimpleNamespace

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget

    class Driver:
        """A driver that is there."""

        @staticmethod
        def is_active() -> bool:
            return True

        @staticmethod
        def get_current_target() -> GPUTarget:
            return GPUTarget("cpu", "interpreter", 1)

    class Compiler:
        """Compiles nothing; torch.compile asks it for a name in its cache."""

        def __init__(self, target: GPUTarget) -> None:
            self._target = target

        @staticmethod
        def supports_target(target: GPUTarget) -> bool:
            return target.backend == "cpu"

        def hash(self) -> str:
            return str(self._target)

    backends.setdefault("cpu", SimpleNamespace(compiler=Compiler, driver=Driver))
