"""Builds the native ops when torch and a C++ compiler are there, those for CUDA when nvcc is there too.

Installs without them otherwise.
"""

from __future__ import annotations

import gzip
import os
import platform
import sys
import tarfile

from setuptools import setup
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "scripts"))
import nvcc  # noqa: E402

NO_NATIVE = "VLLM_ADAPTIVESPEC_NO_NATIVE"

SOURCES = [
    "csrc/bindings.cpp",
    "csrc/cpu/isa.cpp",
    "csrc/cpu/build_tree.cpp",
    "csrc/cpu/walk_trees.cpp",
    "csrc/cpu/commit_kv.cpp",
    "csrc/cpu/tree_attention.cpp",
    "csrc/cpu/topk_logprobs.cpp",
    "csrc/cpu/linear.cpp",
    "csrc/cpu/rows.cpp",
    "csrc/cpu/draft_input.cpp",
    "csrc/cpu/draft_layer.cpp",
]
SHARED = [
    "csrc/schemas.h",
    "csrc/host/attention.h",
    "csrc/host/build_tree.h",
    "csrc/host/checks.h",
    "csrc/host/commit_kv.h",
    "csrc/host/topk_logprobs.h",
    "csrc/host/walk_trees.h",
    "csrc/include/adaptivespec/attention.h",
    "csrc/include/adaptivespec/commit.h",
    "csrc/include/adaptivespec/host_device.h",
    "csrc/include/adaptivespec/paged_kv.h",
    "csrc/include/adaptivespec/row_max.h",
    "csrc/include/adaptivespec/scalar_types.h",
    "csrc/include/adaptivespec/topk.h",
    "csrc/include/adaptivespec/tree.h",
    "csrc/include/adaptivespec/walk.h",
]
DEPENDS = [
    *SHARED,
    "csrc/cpu/attend_trees.h",
    "csrc/cpu/each_isa.inc",
    "csrc/cpu/isa.h",
    "csrc/cpu/isa_begin.inc",
    "csrc/cpu/isa_end.inc",
    "csrc/cpu/linear.h",
    "csrc/cpu/linear.inc",
    "csrc/cpu/ops.h",
    "csrc/cpu/row_max.inc",
    "csrc/cpu/rows.h",
    "csrc/cpu/rows.inc",
    "csrc/cpu/simd.inc",
    "csrc/cpu/topk_logprobs.inc",
    "csrc/cpu/tree_attention.inc",
]
CUDA_SOURCES = ["csrc/cuda/bindings.cpp", "csrc/cuda/ops.cpp"]  # and nvcc.SOURCES
CUDA_DEPENDS = [
    *SHARED,
    "csrc/cuda/kernels.h",
    "csrc/cuda/ops.h",
    "csrc/cuda/registration.h",
    "csrc/cuda/stream.h",
]
INCLUDES = [os.path.abspath(path) for path in ("csrc", "csrc/include", "csrc/host")]

# Stable ABI of torch 2.10, and (through py_limited_api) that of Python: one build serves later versions of both.
TORCH_TARGET_VERSION = "0x020a000000000000"

COMPILE_ARGS = [
    "-O3",
    "-std=c++20",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wall",
    "-Wno-psabi",  # vectors wider than the baseline's registers are passed between inlined functions only
    "-Wno-maybe-uninitialized",  # GCC 12 reports its own intrinsics headers
    "-g0",
    f"-ffile-prefix-map={HERE}/=",  # the same bytes wherever it is built
]


CUDA_MODULE = "adaptivespec_vllm._C_cuda"


def say(text: str) -> None:
    print(f"adaptivespec: {text}", file=sys.stderr)


def cuda_toolkit() -> nvcc.Toolkit | None:
    """What the CUDA ops are built with, or None with the reason on stderr."""
    import torch

    if torch.version.cuda is None and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        say("this torch has no CUDA, building without CUDA ops (TORCH_CUDA_ARCH_LIST builds them all the same)")
        return None
    toolkit = nvcc.find_toolkit()
    if toolkit is None or toolkit.runtime is None:
        say("no CUDA toolkit with nvcc and libcudart_static.a found (CUDA_HOME), building without CUDA ops")
        return None
    return toolkit


def cuda_extension(toolkit: nvcc.Toolkit, common: dict):
    """The module of the CUDA ops; it brings its CUDA runtime along, to load beside any torch and without a driver."""
    from torch.utils.cpp_extension import CppExtension

    return CppExtension(
        CUDA_MODULE,
        CUDA_SOURCES,
        depends=[*CUDA_DEPENDS, *nvcc.SOURCES],
        include_dirs=[*INCLUDES, os.path.abspath("csrc/cuda"), str(toolkit.includes)],
        # The current stream is asked of torch_cuda by a weak symbol, which alone would not make the linker keep the
        # library. In torch's CUDA builds libtorch brings it along, also for a module that was built beside another.
        extra_link_args=["-Wl,--no-as-needed", "-ltorch", str(toolkit.runtime), "-lrt", "-lpthread", "-ldl"],
        **common,
    )


class Sdist(sdist):
    """With ``SOURCE_DATE_EPOCH`` set, the same sources make the same bytes: one date, no owner, plain modes."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.mtime = int(epoch)
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            return entry

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(os.path.join(root_dir or ".", base_dir), base_dir, filter=plain)
        return path


def native_build() -> dict:
    """Arguments of ``setup`` that build the native modules, or none with the reason on stderr."""
    if os.environ.get(NO_NATIVE) == "1":
        say(f"{NO_NATIVE}=1, building without native ops")
        return {}
    if platform.system() == "Windows":
        say("the native ops need GCC or Clang, building without them")
        return {}
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        say("torch is not importable here, building without native ops")
        return {}
    required = os.environ.get(NO_NATIVE) == "0"
    toolkit = cuda_toolkit()

    class OptionalBuild(BuildExtension):
        """A failed compilation leaves the reference ops in place instead of failing the installation."""

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:  # a missing compiler surfaces as any of a dozen types
                if required:  # asked for: an error is an error
                    raise
                say(f"native ops not built ({error}); set {NO_NATIVE}=0 to make this an error")

        def build_extension(self, ext) -> None:
            if ext.name == CUDA_MODULE:
                architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or nvcc.DEFAULT_ARCHITECTURES
                try:
                    objects = nvcc.compile_sources(toolkit, architectures, nvcc.ROOT / "build" / "cuda")
                except (RuntimeError, ValueError) as error:
                    raise CompileError(str(error)) from error
                ext.extra_objects = [str(each.output) for each in objects]
            super().build_extension(ext)

    common = {
        "define_macros": [("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
        "extra_compile_args": [*COMPILE_ARGS, f"-ffile-prefix-map={os.path.dirname(torch.__path__[0])}/="],
        "py_limited_api": True,
        "optional": not required,
    }
    cpu = CppExtension(
        "adaptivespec_vllm._C",
        SOURCES,
        depends=DEPENDS,
        include_dirs=[*INCLUDES, os.path.abspath("csrc/cpu")],
        **common,
    )
    return {
        "ext_modules": [cpu] if toolkit is None else [cpu, cuda_extension(toolkit, common)],
        "cmdclass": {"build_ext": OptionalBuild},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


native = native_build()
setup(**{**native, "cmdclass": {**native.get("cmdclass", {}), "sdist": Sdist}})
