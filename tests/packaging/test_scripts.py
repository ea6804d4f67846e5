"""The scripts that run Dockerfiles and workflows do what an engine and GitHub would."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import run_dockerfile, run_workflow


@pytest.fixture
def build(tmp_path: Path) -> run_dockerfile.Build:
    """A build whose stages are copies of an empty root, before its first instruction."""
    for name in ("base/etc", "context/sub", "output"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "context/file").write_text("1")
    (tmp_path / "context/sub/inner").write_text("2")
    return run_dockerfile.Build(tmp_path / "base", tmp_path / "output", tmp_path / "context", [], {}, [])


def test_files_are_copied_as_an_engine_does(build: run_dockerfile.Build) -> None:
    build.step("FROM", "base AS first")
    build.step("WORKDIR", "/work")
    build.step("COPY", "file ./")
    build.step("COPY", "file /opt/renamed")
    build.step("COPY", "sub sub")
    build.step("FROM", "base")
    build.step("COPY", "--from=first /work /there")
    first, last = (Path(image.root) for image in build.stages.values())
    assert (first / "work/file").read_text() == (first / "opt/renamed").read_text() == "1"
    assert (first / "work/sub/inner").read_text() == (last / "there/sub/inner").read_text() == "2"


def test_variables_and_commands_of_the_last_stage(build: run_dockerfile.Build) -> None:
    for instruction, value in [
        ("ARG", 'NAME="some thing"'),
        ("FROM", "base"),
        ("ENV", "A=1 B=$A/2"),
        ("ENV", "C=${B}/3"),
        ("USER", "7:8"),
        ("HEALTHCHECK", '--interval=1s CMD ["check", "it"]'),
        ("CMD", "echo $C"),
    ]:
        build.step(instruction, value)
    assert build.image and build.args == {"NAME": "some thing"}
    assert build.image.env["C"].endswith("/3") and build.image.user == "7:8"
    assert build.image.healthcheck == ["check", "it"]
    assert build.image.cmd == ["/bin/sh", "-c", "echo $C"]


@pytest.mark.parametrize(
    "instruction, value", [("ADD", "a b"), ("RUN", "--mount=type=bind true"), ("COPY", "--chown=1 file ./")]
)
def test_what_it_cannot_run_is_refused(build: run_dockerfile.Build, instruction: str, value: str) -> None:
    with pytest.raises(run_dockerfile.Refused):
        build.step(instruction, value)  # before FROM
    build.step("FROM", "base")
    with pytest.raises(run_dockerfile.Refused):
        build.step(instruction, value)


def test_a_step_of_a_workflow_gets_its_variables_and_no_unknown_ones(capfd: pytest.CaptureFixture[str]) -> None:
    workflow = {"env": {"ONE": "1"}, "jobs": {}}
    job = {"env": {"TWO": "${{ matrix.two }}"}}
    step = {"run": 'echo "$ONE$TWO ${{ inputs.three }}"; echo "out=4" >> "$GITHUB_OUTPUT"; exit 5'}
    known = {"matrix.two": "2", "inputs.three": "3"}
    assert run_workflow.run(workflow, job, step, known) == 5
    assert capfd.readouterr().out.splitlines() == ["12 3", "GITHUB_OUTPUT: out=4"]
    with pytest.raises(SystemExit, match=r"inputs\.three"):
        run_workflow.run(workflow, job, step, {"matrix.two": "2"})
    with pytest.raises(SystemExit, match="actions/checkout"):
        run_workflow.run(workflow, job, {"uses": "actions/checkout@v1"}, {})
