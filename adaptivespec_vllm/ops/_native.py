"""Loads the compiled ops; without them the plain-torch twins are used, with one warning."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from types import ModuleType

import torch  # its libraries must be loaded before ours

# A child of vLLM's logger: shown wherever vLLM's messages are, and importable without vLLM.
logger = logging.getLogger("vllm.adaptivespec")

CUDA_OPS = ("build_tree", "walk_trees", "tree_attention", "tree_part_attention", "commit_kv", "topk_logprobs")
CPU_OPS = (*CUDA_OPS, "linear", "draft_input", "draft_layer")
"""The last three exist to make a CPU fast at what a GPU does with the libraries of its own."""

_CUDA_MODULE = "adaptivespec_vllm._C_cuda"


def _load() -> ModuleType | None:
    try:
        return importlib.import_module("adaptivespec_vllm._C")
    except ImportError as error:
        logger.warning(
            "native ops are not available (%s): using the plain torch reference, which is much slower; "
            "reinstall with a C++ compiler to build them",
            error,
        )
        return None


def _load_cuda() -> bool:
    # Asking whether a GPU is there would start the driver in a process that may yet fork.
    if _module is None or torch.version.cuda is None or importlib.util.find_spec(_CUDA_MODULE) is None:
        return False
    try:
        importlib.import_module(_CUDA_MODULE)
    except ImportError as error:
        logger.warning("the CUDA ops do not load (%s): using the plain torch reference on GPUs", error)
        return False
    return True


_module = _load()
_cuda_loaded = _load_cuda()


def _callables(names: tuple[str, ...]) -> dict[str, Callable[..., None]]:
    return {name: getattr(torch.ops.adaptivespec, name).default for name in names}


_by_device = {
    "cpu": _callables(CPU_OPS) if _module is not None else {},
    "cuda": _callables(CUDA_OPS) if _cuda_loaded else {},
}


def native_op(name: str, tensor: torch.Tensor) -> Callable[..., None] | None:
    """The compiled op for tensors like this one; None: the reference stands in."""
    return _by_device.get(tensor.device.type, {}).get(name)


def native_ops_loaded() -> bool:
    """Whether ``torch.ops.adaptivespec.*`` exists in this process."""
    return _module is not None


def cuda_ops_loaded() -> bool:
    """Whether the ops have CUDA kernels in this process; says nothing about a GPU being there."""
    return _cuda_loaded


def describe() -> dict[str, str]:
    """The implementation in use a device type, for people to read.

    >>> describe()  # doctest: +SKIP
    {'cpu': 'native (avx512)', 'cuda': 'reference (not built)'}
    """
    if _cuda_loaded:
        cuda = "native"
    elif importlib.util.find_spec(_CUDA_MODULE) is None:
        cuda = "reference (not built)"
    else:
        cuda = "reference (built, but this torch has no CUDA)" if torch.version.cuda is None else "reference"
    cpu = f"native ({_module.vector_isa()})" if _module is not None else "reference"
    return {"cpu": cpu, "cuda": cuda}
