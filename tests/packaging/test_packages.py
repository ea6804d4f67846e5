"""The packages as users get them: what is in them, that they install, and what they say where there is no vLLM."""

from __future__ import annotations

import email
import hashlib
import json
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from adaptivespec_vllm import __version__
from tests.packaging.conftest import ROOT, Environment, run


def sums(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def only(directory: Path, pattern: str) -> Path:
    (path,) = directory.glob(pattern)
    return path


def test_the_same_sources_make_the_same_bytes(built: list[Path]) -> None:
    assert len(sums(built[0])) == 2
    assert sums(built[0]) == sums(built[1])


def test_checkers_find_nothing(built: list[Path]) -> None:
    files = sorted(built[0].iterdir())
    run([sys.executable, "-m", "twine", "check", "--strict", *files])
    run([sys.executable, "-m", "check_wheel_contents", only(built[0], "*.whl")])


def test_the_wheel_has_the_head_the_type_marker_and_the_one_version(built: list[Path]) -> None:
    wheel = zipfile.ZipFile(only(built[0], "*.whl"))
    names = set(wheel.namelist())
    assert {
        "adaptivespec_vllm/py.typed",
        "adaptivespec_vllm/demo/assets/smollm2-135m-eagle3/config.json",
        "adaptivespec_vllm/simulate/costs/a100-8b.json",
    } <= names
    assert {name.split("/")[0] for name in names} == {"adaptivespec_vllm", f"adaptivespec_vllm-{__version__}.dist-info"}
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_vllm_and_no_torch_are_asked_for_without_an_extra(built: list[Path]) -> None:
    wheel = zipfile.ZipFile(only(built[0], "*.whl"))
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_string(wheel.read(path).decode())
    required = metadata.get_all("Requires-Dist") or []
    plain = [line for line in required if "extra ==" not in line]
    assert plain and not [line for line in plain if line.startswith(("vllm", "torch"))]
    by_extra = {line.split("extra == ")[1].strip("\"'"): line for line in required if line.startswith("vllm")}
    assert set(by_extra) == {"cpu", "cuda"}
    assert {"bench", "cpu", "cuda", "demo", "train", "xformers"} <= set(metadata.get_all("Provides-Extra"))


def test_the_sdist_has_all_that_builds_the_ops(built: list[Path]) -> None:
    with tarfile.open(only(built[0], "*.tar.gz")) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert sources | {"setup.py", "pyproject.toml", "LICENSE", "scripts/nvcc.py", "scripts/nvcc.txt"} <= inside


@pytest.mark.parametrize(
    "command",
    [["check"], ["check", "--json"], ["demo"], ["demo", "--prepare"], ["bench", "--model", "x"], ["simulate"]],
    ids=" ".join,
)
def test_without_vllm_a_line_says_what_to_install(without_vllm: Environment, command: list[str]) -> None:
    done = without_vllm.call("adaptivespec", *command)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Traceback" not in said
    assert "vLLM is not installed" in said and "adaptivespec-vllm[cuda]" in said and "adaptivespec-vllm[cpu]" in said
    if "--json" in command:
        assert json.loads(done.stdout)["ok"] is False


def test_the_sdist_installs_where_there_is_no_torch(built: list[Path], without_vllm: Environment) -> None:
    without_vllm.install("--force-reinstall", "--no-deps", only(built[0], "*.tar.gz"))
    done = without_vllm.call("python", "-c", "import adaptivespec_vllm as a; print(a.__version__, a.__file__)")
    version, place = done.stdout.split()
    assert version == __version__ and place.startswith(str(without_vllm.root))
    assert without_vllm.call("adaptivespec", "--help").returncode == 0
