"""Copies between host and device. Nothing here makes the host wait but :func:`to_host`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


def to_device(values: np.ndarray | torch.Tensor | Sequence[Any], device: torch.device) -> torch.Tensor:
    """Host values on the device, without a wait; on a CPU the same memory where there is one."""
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values)
    elif not isinstance(values, torch.Tensor):
        values = torch.tensor(values)
    return values if device.type == "cpu" else async_tensor_h2d(values, device=device)


def to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Device tensors on the host, all in one wait; those of a CPU are given back as they are."""
    if all(tensor.is_cpu for tensor in tensors):
        return list(tensors)
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for tensor in tensors
    ]
    ready = torch.Event()
    ready.record()
    ready.synchronize()
    return copies
