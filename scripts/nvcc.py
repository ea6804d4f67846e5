"""Finds nvcc and compiles the CUDA sources; used by setup.py and by scripts/cuda_resources.py.

Run by itself it says which toolkit would be used, and exits with 1 where there is none.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
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
INCLUDES = ("csrc/include", "csrc/cuda")

DEFAULT_ARCHITECTURES = "8.0;9.0;10.0+PTX"
"""A100, H100 and H200, B200; PTX for what comes after. Other GPUs: TORCH_CUDA_ARCH_LIST."""


class Toolkit(NamedTuple):
    """A CUDA toolkit: its compiler, and the static runtime that an extension is linked with (None: not there)."""

    nvcc: Path
    runtime: Path | None

    @property
    def includes(self) -> Path:
        return self.nvcc.parent.parent / "include"

    @property
    def version(self) -> str:
        text = subprocess.run([self.nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"release (\d+\.\d+)", text)
        return found.group(1) if found else "unknown"


class Compiled(NamedTuple):
    """An object file, what the assembler said of its kernels, and how long it took."""

    source: str
    output: Path
    report: str
    seconds: float


def find_toolkit() -> Toolkit | None:
    """The toolkit of ``CUDA_HOME``, of the path, of ``/usr/local/cuda`` or of NVIDIA's Python packages."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    homes += [Path("/usr/local/cuda"), *Path(sysconfig.get_path("purelib"), "nvidia").glob("cu1*")]
    toolkits = []
    for home in homes:
        nvcc = home / "bin" / "nvcc"
        if nvcc.is_file() and (home / "include" / "cuda_runtime.h").is_file():
            places = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
            libraries = [home / place / "libcudart_static.a" for place in places]
            toolkits.append(Toolkit(nvcc, next(filter(Path.is_file, libraries), None)))
    return next((toolkit for toolkit in toolkits if toolkit.runtime), toolkits[0] if toolkits else None)


def architecture_flags(architectures: str) -> list[str]:
    """nvcc's flags for a list as torch writes it: ``"8.0;9.0a 10.0+PTX"``.

    Raises:
        ValueError: an entry is not a compute capability, or an older one than tensor cores for bfloat16 need.

    """
    flags = []
    for entry in re.split(r"[;, ]+", architectures.strip()):
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", entry)
        if not match or int(match.group(1)) < 8:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST: {entry!r} is not a compute capability of 8.0 or more, such as 9.0 or 10.0+PTX"
            )
        number = match.group(1) + match.group(2)
        codes = [f"sm_{number}"] + ([f"compute_{number}"] if match.group(3) else [])
        flags += [f"-gencode=arch=compute_{number},code={code}" for code in codes]
    return flags


def compile_sources(toolkit: Toolkit, architectures: str, directory: Path, jobs: int | None = None) -> list[Compiled]:
    """An object of every source in ``SOURCES``; those whose inputs have not changed are taken as they lie there.

    Every warning is an error, spilled registers are a warning.

    Raises:
        RuntimeError: a source does not compile; the message holds what the compiler said.
        ValueError: as :func:`architecture_flags`.

    """
    command = [
        str(toolkit.nvcc), "-c", "-O3", "-std=c++20", "--expt-relaxed-constexpr", "-Xptxas=-v",
        *(f"-I{ROOT / path}" for path in INCLUDES), "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-Werror=all-warnings", "-Xcompiler=-Wall,-Werror", "-Xptxas=-warn-spills,-warn-lmem-usage",
        *architecture_flags(architectures),
    ]  # fmt: skip
    inputs = hashlib.sha256(" ".join([toolkit.version, *command]).encode())
    for header in sorted(file for path in INCLUDES for file in (ROOT / path).rglob("*.h")):
        inputs.update(header.read_bytes())
    directory.mkdir(parents=True, exist_ok=True)

    def compile_one(source: str) -> Compiled:
        own = inputs.copy()
        own.update((ROOT / source).read_bytes())
        output = directory / f"{Path(source).stem}_{own.hexdigest()[:16]}.o"
        report = output.with_suffix(".log")
        started = time.perf_counter()
        if not (output.exists() and report.exists()):
            partial = output.with_suffix(".part.o")
            done = subprocess.run(
                [*command, str(ROOT / source), "-o", str(partial)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{source}:\n{done.stdout}{done.stderr}")
            report.write_text(done.stdout + done.stderr)
            partial.rename(output)
        return Compiled(source, output, report.read_text(), time.perf_counter() - started)

    with ThreadPoolExecutor(jobs or int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        return list(pool.map(compile_one, SOURCES))


if __name__ == "__main__":
    found = find_toolkit()
    print(f"CUDA {found.version}, {found.nvcc}, runtime {found.runtime}" if found else "no nvcc")
    sys.exit(found is None)
