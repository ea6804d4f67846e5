"""The CUDA sources compiled for the CPU (``cuda_runtime.h`` beside this file) and loaded as ops of their own.

>>> load(Path("build"))  # doctest: +SKIP
>>> torch.ops.adaptivespec_emulated.walk_trees  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

sys.path.insert(0, str(ROOT / "scripts"))
from nvcc import SOURCES  # noqa: E402

COMPILER = shutil.which("c++") or shutil.which("g++")
INCLUDES = [HERE, ROOT / "csrc", ROOT / "csrc/include", ROOT / "csrc/host", ROOT / "csrc/cuda"]
ALL_SOURCES = [*(ROOT / source for source in SOURCES), ROOT / "csrc/cuda/ops.cpp", HERE / "bindings.cpp"]
FLAGS = [
    "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror", "-Wno-unknown-pragmas",
    "-DADAPTIVESPEC_EMULATED", "-DTORCH_TARGET_VERSION=0x020a000000000000",
]  # fmt: skip


def _fingerprint() -> str:
    files = sorted([*ROOT.glob("csrc/**/*.h"), *ALL_SOURCES, *HERE.glob("*.*")])
    digest = hashlib.sha256(torch.__version__.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def build(directory: Path) -> Path:
    """The compiled library below ``directory``, made if the sources have changed.

    Raises:
        RuntimeError: it does not compile; the message holds what the compiler said.

    """
    target = directory / f"emulated_{_fingerprint()}.so"
    if target.exists():
        return target
    if COMPILER is None:
        raise RuntimeError("no C++ compiler")
    directory.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{path}" for path in INCLUDES] + [f"-isystem{path}" for path in cpp_extension.include_paths()]

    def run(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")

    def compile_one(source: Path) -> str:
        output = directory / f"{target.stem}_{source.stem}_{source.suffix[1:]}.o"
        run(COMPILER, *FLAGS, *includes, "-x", "c++", "-c", str(source), "-o", str(output))
        return str(output)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, ALL_SOURCES))
    libraries = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    partial = target.with_suffix(".tmp")
    run(COMPILER, "-shared", *objects, *libraries, "-lc10", "-ltorch", "-ltorch_cpu", "-o", str(partial))
    partial.rename(target)
    for name in objects:
        Path(name).unlink()
    return target


def load(directory: Path) -> None:
    """Registers ``torch.ops.adaptivespec_emulated``."""
    torch.ops.load_library(build(directory))
