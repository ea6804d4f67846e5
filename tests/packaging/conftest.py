"""Copies of the sources, packages built from them, environments to install those into."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EPOCH = "1700000000"


def copy_sources(target: Path) -> Path:
    """What git knows or would add, so that nothing that lies here only gets into a package unseen."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((ROOT / name).read_bytes())
            path.chmod((ROOT / name).stat().st_mode)
    return target


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what puts a working tree before an installed package."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
    return {**kept, "SOURCE_DATE_EPOCH": EPOCH, **more}


def run(command: list[str | Path], **options) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@dataclass
class Environment:
    """An environment of its own, with nothing in it but what is installed."""

    root: Path

    def install(self, *arguments: str | Path) -> None:
        run([self.root / "bin/python", "-m", "pip", "install", "-q", *arguments], env=clean_environment())

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of its ``bin``, in an empty directory."""
        directory = self.root / "empty"
        directory.mkdir(exist_ok=True)
        environment = clean_environment(VLLM_ADAPTIVESPEC_CACHE=str(directory))
        return subprocess.run(
            [self.root / "bin" / command[0], *command[1:]],
            cwd=directory, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip


def new_environment(root: Path) -> Environment:
    run([sys.executable, "-m", "venv", root])
    return Environment(root)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two directories with an sdist and a wheel without native ops, built from sources at different places."""
    outputs = []
    for place in ("a", "somewhere/else"):
        base = tmp_path_factory.mktemp("packages")
        sources = copy_sources(base / place)
        run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", base / "dist", "."],
            cwd=sources, env=clean_environment(VLLM_ADAPTIVESPEC_NO_NATIVE="1"),
        )  # fmt: skip
        outputs.append(base / "dist")
    return outputs


@pytest.fixture(scope="session")
def without_vllm(built: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and what it asks for, and so without vLLM and torch."""
    environment = new_environment(tmp_path_factory.mktemp("environment") / "without-vllm")
    environment.install(*built[0].glob("*.whl"))
    return environment
