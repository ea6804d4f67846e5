"""The Triton kernels compiled for real GPUs, as they are launched: the interpreter lets more pass than the compiler."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this is the interpreter's process", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from adaptivespec_vllm.attention import PagedKV, TreePlaces, triton_kernels, triton_paged  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="Triton comes without CUDA's tools here")

NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip


class Launches:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.with_: list[tuple[dict, dict]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        names = list(inspect.signature(self.kernel.fn).parameters)
        return lambda *args, **constants: self.with_.append((dict(zip(names, args, strict=False)), constants))


def launches(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dim: int, group: int, fp8: bool, splits: int) -> list:
    """Both kernels, with the arguments of a batch of three trees in vLLM's cache layout."""
    fakes = SimpleNamespace(
        dot_type=triton_kernels.dot_type,
        tree_attention_kernel=Launches(triton_kernels.tree_attention_kernel),
        join_splits_kernel=Launches(triton_kernels.join_splits_kernel),
    )
    monkeypatch.setattr(triton_paged, "kernels", lambda: fakes)

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kv_heads, rows = 2, 3 * 16
    stored = meta(40, 16, kv_heads, 2 * dim, dtype=torch.float8_e4m3fn if fp8 else dtype).transpose(1, 2)
    scales = (meta(1, dtype=torch.float32),) * 2 if fp8 else ()
    start = meta(4, dtype=torch.int32)
    places = TreePlaces(
        meta(3, 64, dtype=torch.int32), start[:3], start, start, meta(rows, dtype=torch.int64), [900] * 3, [16] * 3,
        [16] * 3,
    )  # fmt: skip
    query = meta(rows, kv_heads * group, dim)
    triton_paged.TritonTreeAttention(splits)(
        query, meta(rows, kv_heads, dim), meta(rows, kv_heads, dim), PagedKV(*stored.split(dim, -1), *scales), places,
        0.1, torch.empty_like(query),
    )  # fmt: skip
    return [
        (fake.kernel, *fake.with_[0]) for fake in (fakes.tree_attention_kernel, fakes.join_splits_kernel) if fake.with_
    ]


def resources(kernel: Any, arguments: dict, constants: dict, architecture: int, folder: Path) -> tuple[int, int]:
    """Registers and bytes of stack of a kernel, specialized as Triton does at a launch."""
    warps = constants.pop("num_warps", 4)
    signature, attributes, known = {}, {}, dict(constants)
    for place, (name, value) in enumerate(arguments.items()):
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
            attributes[place,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], known[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=attributes)
    binary = folder / f"{kernel.fn.__name__}_{architecture}.cubin"
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
    binary.write_bytes(compiled.asm["cubin"])
    shown = subprocess.run(
        [TOOLS / "cuobjdump", "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    return int(re.search(r"REG:(\d+)", shown)[1]), int(re.search(r"STACK:(\d+)", shown)[1])


@pytest.mark.parametrize(
    ("architecture", "dtype", "dim", "group", "fp8", "splits"),
    [
        (80, torch.bfloat16, 128, 4, False, 1),
        (90, torch.bfloat16, 128, 8, False, 4),
        (90, torch.bfloat16, 64, 7, True, 1),
        (90, torch.bfloat16, 80, 1, False, 2),
        (100, torch.bfloat16, 256, 2, False, 1),
    ],
)
def test_it_compiles_without_a_spill(monkeypatch, tmp_path, architecture, dtype, dim, group, fp8, splits) -> None:
    for kernel, arguments, constants in launches(monkeypatch, dtype, dim, group, fp8, splits):
        registers, stack = resources(kernel, arguments, constants, architecture, tmp_path)
        print(f"{kernel.fn.__name__} sm_{architecture}: {registers} registers, {stack} bytes of stack")
        assert stack == 0
