"""The CUDA sources compile for every architecture, without warnings and spills, to a module that loads anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops._native import CUDA_OPS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import nvcc  # noqa: E402
from cuda_resources import kernels_of, table  # noqa: E402

TOOLKIT = nvcc.find_toolkit()
needs_nvcc = pytest.mark.skipif(TOOLKIT is None, reason="no CUDA toolkit with nvcc on this machine")

HOT = ("scan_rows", "walk_requests", "attend_tile", "move_rows", "topk")


@pytest.fixture(scope="module")
def compiled():
    return nvcc.compile_sources(TOOLKIT, nvcc.DEFAULT_ARCHITECTURES, ROOT / "build" / "cuda")


@needs_nvcc
def test_no_kernel_spills(compiled):
    kernels = [kernel for each in compiled for kernel in kernels_of(each.source, each.report)]
    print("\n" + "\n".join(table(kernels)))
    for architecture in ("sm_80", "sm_90", "sm_100"):
        names = {kernel.name.split("<")[0] for kernel in kernels if kernel.architecture == architecture}
        assert names >= {*HOT, "build", "attend"}
    assert {(kernel.name, kernel.architecture) for kernel in kernels if kernel.spilled or kernel.stack} == set()
    assert max(kernel.shared for kernel in kernels) <= 48 * 1024  # what a kernel may have without asking


BUILD_ONE = """
import runpy, setuptools, sys
real = setuptools.setup
def cuda_alone(**arguments):
    wanted = [each for each in arguments["ext_modules"] if each.name.endswith("_C_cuda")]
    real(**arguments | {"ext_modules": wanted})
setuptools.setup = cuda_alone
sys.argv = ["setup.py", "build_ext", "--build-lib", sys.argv[1], "--build-temp", sys.argv[1]]
runpy.run_path("setup.py", run_name="__main__")
"""

LOAD = """
import importlib.util, sys, torch
from adaptivespec_vllm import ops
spec = importlib.util.spec_from_file_location("adaptivespec_vllm._C_cuda", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(*(name for name in sys.argv[2:] if has(f"adaptivespec::{name}", "CUDA")))
"""


@needs_nvcc
@pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")
def test_the_module_is_built_and_loads_without_a_driver(compiled, tmp_path):
    def run(program: str, *arguments: str) -> str:
        environment = os.environ | {
            "TORCH_CUDA_ARCH_LIST": nvcc.DEFAULT_ARCHITECTURES, "VLLM_ADAPTIVESPEC_NO_NATIVE": "0"
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(BUILD_ONE, str(tmp_path))
    (module,) = tmp_path.glob("adaptivespec_vllm/_C_cuda*.so")
    assert run(LOAD, str(module), *CUDA_OPS, "linear").split() == list(CUDA_OPS)


def test_architecture_lists():
    assert nvcc.architecture_flags("8.0;9.0a 10.0+PTX") == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]
    for wrong in ("Hopper", "7.5", "90", ""):
        with pytest.raises(ValueError, match=r"TORCH_CUDA_ARCH_LIST: .* is not a compute capability of 8.0 or more"):
            nvcc.architecture_flags(wrong)


@needs_nvcc
def test_a_source_that_does_not_compile_says_so(tmp_path, monkeypatch):
    wrong = tmp_path / "wrong.cu"
    wrong.write_text("int unused() { int x; return 0; }\n__global__ void k(int* p) { p[0] = q; }\n")
    monkeypatch.setattr(nvcc, "SOURCES", [str(wrong)])
    with pytest.raises(RuntimeError, match=r'(?s)wrong\.cu.*"q" is undefined'):
        nvcc.compile_sources(TOOLKIT, "8.0", tmp_path / "objects")


def test_spills_are_seen():
    report = """
ptxas info    : Compiling entry function '_Z3fooPi' for 'sm_90'
ptxas info    : Function properties for _Z3fooPi
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 64 bytes smem
"""
    (kernel,) = kernels_of("foo.cu", report)
    assert (kernel.architecture, kernel.registers, kernel.shared) == ("sm_90", 255, 64)
    assert (kernel.stack, kernel.spilled) == (24, 36)
