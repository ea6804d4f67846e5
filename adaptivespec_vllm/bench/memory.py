"""Memory that this process holds, and that the machine has left."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


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


def available() -> int | None:
    """Bytes left where engines live: on the CUDA device, or of the machine; ``None`` where nobody says."""
    cuda = _cuda()
    if cuda is not None:
        return int(cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _cuda() -> Any:
    import torch

    return torch.cuda if torch.cuda.is_available() else None
