"""Loads the compiled ops; without them the plain-torch twins are used, with one warning."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

# A child of vLLM's logger: shown wherever vLLM's messages are, and importable without vLLM.
logger = logging.getLogger("vllm.adaptivespec")


def _load() -> ModuleType | None:
    import torch  # noqa: F401  (its libraries must be loaded before ours)

    try:
        return importlib.import_module("adaptivespec_vllm._C")
    except ImportError as error:
        logger.warning(
            "native ops are not available (%s): using the plain torch reference, which is much slower; "
            "reinstall with a C++ compiler to build them",
            error,
        )
        return None


_module = _load()


def native_ops_loaded() -> bool:
    """Whether ``torch.ops.adaptivespec.*`` exists in this process."""
    return _module is not None


def describe() -> dict[str, str]:
    """The implementation in use a device type, for people to read.

    >>> describe()  # doctest: +SKIP
    {'cpu': 'native (avx512)', 'cuda': 'reference (not built)'}
    """
    cpu = f"native ({_module.vector_isa()})" if _module is not None else "reference"
    return {"cpu": cpu, "cuda": "reference (not built)"}
