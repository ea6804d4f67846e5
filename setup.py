"""Builds the native ops when torch and a C++ compiler are there; installs without them otherwise."""

from __future__ import annotations

import os
import platform
import sys

from setuptools import setup

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
]


def native_build() -> dict:
    """Arguments of ``setup`` that build ``adaptivespec_vllm._C``, or none with the reason on stderr."""
    if os.environ.get(NO_NATIVE) == "1":
        print(f"adaptivespec: {NO_NATIVE}=1, building without native ops", file=sys.stderr)
        return {}
    if platform.system() == "Windows":
        print("adaptivespec: the native ops need GCC or Clang, building without them", file=sys.stderr)
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        print("adaptivespec: torch is not importable here, building without native ops", file=sys.stderr)
        return {}

    class OptionalBuild(BuildExtension):
        """A failed compilation leaves the reference ops in place instead of failing the installation."""

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:  # a missing compiler surfaces as any of a dozen types
                if os.environ.get(NO_NATIVE) == "0":  # asked for: an error is an error
                    raise
                print(
                    f"adaptivespec: native ops not built ({error}); set {NO_NATIVE}=0 to make this an error",
                    file=sys.stderr,
                )

    extension = CppExtension(
        "adaptivespec_vllm._C",
        SOURCES,
        depends=DEPENDS,
        include_dirs=[*INCLUDES, os.path.abspath("csrc/cpu")],
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
        extra_compile_args=COMPILE_ARGS,
        py_limited_api=True,
        optional=os.environ.get(NO_NATIVE) != "0",
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": OptionalBuild},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


setup(**native_build())
