"""The CUDA ops in the place of the CPU's, emulated, for the tests of this folder that ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import _native
from tests.gpu import emulate


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    """Wrappers run the CUDA sources on CPU tensors."""
    if not ops.native_ops_loaded():
        pytest.skip("native ops are not built")
    emulate.load(emulate.ROOT / "build" / "emulated")
    namespace = torch.ops.adaptivespec_emulated
    cuda = {name: getattr(namespace, name).default for name in _native.CUDA_OPS}

    def with_workspace(*arguments: torch.Tensor | None) -> None:
        *given, workspace = arguments
        if workspace is None:
            workspace = ops.walk_workspace(given[2].shape[0], given[0].device)
        cuda["walk_trees"](*given, workspace)

    before = _native._by_device["cpu"]
    _native._by_device["cpu"] = cuda | {"walk_trees": with_workspace}
    yield
    _native._by_device["cpu"] = before
