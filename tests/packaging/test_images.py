"""The Dockerfiles and what goes with them; `make image-check` runs docker/Dockerfile.cpu line by line."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from scripts import run_dockerfile
from tests.packaging.conftest import ROOT, run

DOCKERFILES = ["docker/Dockerfile", "docker/Dockerfile.cpu"]
COMPOSE = ROOT / "docker/compose.yaml"


def instructions(name: str) -> list[tuple[str, str]]:
    return list(run_dockerfile.instructions(ROOT / name))


def tool(name: str) -> str:
    """A program beside this Python."""
    return str(Path(sys.executable).parent / name)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_linter_finds_nothing(name: str) -> None:
    run([tool("hadolint"), "--config", "docker/hadolint.yaml", name], cwd=ROOT)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_file_that_is_copied_is_there_and_not_ignored(name: str) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for instruction, value in instructions(name):
        *words, _ = shlex.split(value) if instruction == "COPY" else [""]
        for source in [word for word in words if "--from" not in value]:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in allowed, source


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_image_is_pinned_unprivileged_labelled_and_checked(name: str) -> None:
    parsed = DockerfileParser(fileobj=io.BytesIO((ROOT / name).read_bytes()))
    assert re.search(r":v?\d+\.\d+\.\d+", parsed.baseimage)
    last = [index for index, (instruction, _) in enumerate(instructions(name)) if instruction == "FROM"][-1]
    final = dict(instructions(name)[last:])
    assert final["USER"] == "10001:10001"
    assert final["VOLUME"] == "/cache"
    assert "/health" in final["HEALTHCHECK"]
    assert parsed.labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_the_cuda_image_is_of_the_vllm_that_is_tested() -> None:
    from adaptivespec_vllm.engine.seam import TESTED_VLLM

    parsed = DockerfileParser(fileobj=io.BytesIO((ROOT / "docker/Dockerfile").read_bytes()))
    assert parsed.baseimage == f"vllm/vllm-openai:v{TESTED_VLLM[-1]}"


def test_compose_is_valid_and_its_files_are_there() -> None:
    run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE])
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert {"server", "prometheus", "grafana"} == set(services)
    mounts = [volume.split(":") for service in services.values() for volume in service.get("volumes", [])]
    files = [mount for mount in mounts if mount[0].startswith(".")]
    assert len(files) == 3
    for source, *_ in files:
        assert (COMPOSE.parent / source).is_file(), source
    # Ports are open to this machine only: neither server has a login.
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])


def test_grafana_finds_the_dashboard_and_the_data() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    provider = yaml.safe_load((ROOT / "docker/grafana/dashboards.yaml").read_text())["providers"][0]
    inside = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/adaptivespec.json" in inside
    source = yaml.safe_load((ROOT / "docker/grafana/datasource.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    dashboard = json.loads((ROOT / "examples/grafana/adaptivespec.json").read_text())
    assert f"/api/dashboards/uid/{dashboard['uid']} " in (ROOT / ".github/workflows/docker.yml").read_text()


@pytest.fixture
def served(tmp_path: Path) -> dict[str, str]:
    """An environment in which `vllm` says what it was called with."""
    fake = tmp_path / "vllm"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def test_the_server_of_the_image_passes_pair_and_arguments_on(served: dict[str, str]) -> None:
    said = run(
        [sys.executable, ROOT / "docker/serve.py", "--max-model-len", "512"],
        env={**served, "MODEL": "m", "HEAD": "h/1"},
    )
    configuration = '{"method": "adaptivespec", "model": "h/1"}'
    assert said.splitlines() == ["serve", "m", "--speculative-config", configuration, "--max-model-len", "512"]


def test_half_a_pair_is_refused(served: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docker/serve.py"],
        env={**served, "MODEL": "m", "HEAD": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "HEAD" in done.stderr and "both, or neither" in done.stderr
