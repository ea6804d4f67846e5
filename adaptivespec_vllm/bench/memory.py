"""Memory that this process holds, and that the machine has left."""

from __future__ import annotations

import resource
from typing import Any

import psutil


def resident() -> int:
    """Bytes of this process in memory."""
    return int(psutil.Process().memory_info().rss)


def peak_resident() -> int:
    """The most that it held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_allocated() -> int | None:
    """Bytes that torch holds on the CUDA device; ``None`` where there is none."""
    cuda = _cuda()
    return None if cuda is None else int(cuda.memory_allocated())


def device_peak(*, reset: bool = False) -> int | None:
    """The most that it held since the last reset."""
    cuda = _cuda()
    if cuda is None:
        return None
    peak = int(cuda.max_memory_allocated())
    if reset:
        cuda.reset_peak_memory_stats()
    return peak


def available() -> int:
    """Bytes left where engines live: on the CUDA device, or of the machine."""
    cuda = _cuda()
    return int(psutil.virtual_memory().available if cuda is None else cuda.mem_get_info()[0])


def _cuda() -> Any:
    import torch

    return torch.cuda if torch.cuda.is_available() else None
