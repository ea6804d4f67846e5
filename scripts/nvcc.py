"""Finds nvcc and says how the CUDA sources are compiled; used by setup.py and by scripts/cuda_resources.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

SOURCES = [
    "csrc/cuda/build_tree.cu",
    "csrc/cuda/walk_trees.cu",
    "csrc/cuda/tree_attention.cu",
    "csrc/cuda/tree_part.cu",
    "csrc/cuda/commit_kv.cu",
    "csrc/cuda/topk_logprobs.cu",
]
DEPENDS = [
    "csrc/cuda/kernels.h",
    "csrc/cuda/launch.h",
    "csrc/cuda/loads.h",
    "csrc/cuda/mma.h",
    "csrc/cuda/warp.h",
]

DEFAULT_ARCHITECTURES = "8.0;9.0;10.0+PTX"
"""A100, H100 and H200, B200; PTX for what comes after. Other GPUs: TORCH_CUDA_ARCH_LIST."""


class Toolkit(NamedTuple):
    """A CUDA toolkit: its compiler and the static runtime that an extension is linked with (None: not there)."""

    nvcc: Path
    runtime: Path | None

    @property
    def version(self) -> str:
        text = subprocess.run([self.nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"release (\d+\.\d+)", text)
        return found.group(1) if found else "unknown"


def find_toolkit() -> Toolkit | None:
    """The toolkit of ``CUDA_HOME``, of the path, of ``/usr/local/cuda`` or of NVIDIA's Python packages."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    homes += [Path(on_path).resolve().parent.parent] if on_path else []
    homes += [Path("/usr/local/cuda"), *Path(sysconfig.get_path("purelib"), "nvidia").glob("cu1*")]
    found = [Path(home, "bin", "nvcc") for home in homes if Path(home, "bin", "nvcc").is_file()]
    if not found:
        return Toolkit(Path(on_path), None) if on_path else None
    for nvcc in found:
        for place in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            library = nvcc.parent.parent / place / "libcudart_static.a"
            if library.is_file():
                return Toolkit(nvcc, library)
    return Toolkit(found[0], None)


def architecture_flags(architectures: str) -> list[str]:
    """nvcc's flags for a list as torch writes it: ``"8.0;9.0a 10.0+PTX"``.

    Raises:
        ValueError: an entry is not a compute capability.

    """
    flags = []
    for entry in re.split(r"[;, ]+", architectures.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", entry)
        if not match:
            raise ValueError(f"TORCH_CUDA_ARCH_LIST: {entry!r} is not a compute capability such as 9.0 or 10.0+PTX")
        number = match.group(1) + match.group(2)
        codes = [f"sm_{number}"] + ([f"compute_{number}"] if match.group(3) else [])
        flags += [f"-gencode=arch=compute_{number},code={code}" for code in codes]
    return flags


def compile_command(toolkit: Toolkit, source: str, output: Path, architectures: str, *extra: str) -> list[str]:
    """Compiles one source of ``SOURCES``; every warning is an error."""
    return [
        str(toolkit.nvcc), "-c", str(ROOT / source), "-o", str(output), "-O3", "-std=c++20", f"-I{ROOT / 'csrc/include'}",
        f"-I{ROOT / 'csrc/cuda'}", "--expt-relaxed-constexpr", "-Werror=all-warnings", "-Xcompiler=-fPIC,-Wall,-Werror",
        "-Xcompiler=-fvisibility=hidden", "-Xptxas=-warn-spills,-warn-lmem-usage", *architecture_flags(architectures),
        *extra,
    ]  # fmt: skip
