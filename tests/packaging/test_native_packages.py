"""The wheel that is published: native ops inside, tagged for what it runs on, the same bytes wherever it is built."""

from __future__ import annotations

import io
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

from scripts import nvcc
from tests.packaging.conftest import clean_environment, copy_sources, new_environment, run
from tests.packaging.test_packages import only, sums

pytestmark = pytest.mark.packages

CUDA = {"TORCH_CUDA_ARCH_LIST": "9.0"} if (found := nvcc.find_toolkit()) and found.runtime else {}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    outputs = []
    for place in ("a", "somewhere/else"):
        base = tmp_path_factory.mktemp("native")
        sources = copy_sources(base / place)
        run(
            [sources / "scripts/build_packages.sh", base / "dist"], env=clean_environment(PYTHON=sys.executable, **CUDA)
        )
        outputs.append(base / "dist")
    return outputs


def test_two_builds_are_the_same(native: list[Path]) -> None:
    assert sums(native[0]) == sums(native[1])


def test_the_tag_says_any_python_from_3_11_and_an_old_c_library(native: list[Path]) -> None:
    assert "-cp311-abi3-manylinux_2_" in only(native[0], "*.whl").name


def needed(wheel: Path, module: str) -> set[str]:
    """Libraries that a module of a wheel is linked with."""
    elf = ELFFile(io.BytesIO(zipfile.ZipFile(wheel).read(f"adaptivespec_vllm/{module}.abi3.so")))
    (dynamic,) = (section for section in elf.iter_sections() if isinstance(section, DynamicSection))
    return {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}


@pytest.mark.skipif(not CUDA, reason="no CUDA toolkit")
def test_the_cuda_ops_bring_their_runtime_and_find_the_stream_of_any_torch(native: list[Path]) -> None:
    libraries = needed(only(native[0], "*.whl"), "_C_cuda")
    # The stream is a weak symbol of torch_cuda, which libtorch alone leads to when the module was built without it.
    assert "libtorch.so" in libraries
    assert not [name for name in libraries if "cudart" in name or name == "libcuda.so.1"]


def test_the_ops_of_the_wheel_load_beside_the_torch_that_is_there(native: list[Path], tmp_path: Path) -> None:
    environment = new_environment(tmp_path / "environment")
    environment.install("--no-deps", only(native[0], "*.whl"))
    (site,) = environment.root.glob("lib/python*/site-packages")
    (site / "zz_torch.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch, without a second copy of it
    code = "from adaptivespec_vllm import ops; print(ops.native_ops_loaded(), ops.describe(), ops.__file__)"
    done = environment.call("python", "-c", code)
    assert done.stdout.startswith("True") and str(environment.root) in done.stdout, done.stdout + done.stderr
