"""Lists the steps of a GitHub workflow, and runs the scripts among them on this machine.

    run_workflow.py .github/workflows/tests.yml                          # what there is, by job and number
    run_workflow.py .github/workflows/docker.yml image 4 --set matrix.variant=cpu --set matrix.python=python

Steps that use actions are named and not run. An expression is replaced by what --set says of it; one of which nothing
is said ends the run, so that nothing is run that the workflow does not say.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
SHELL = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"]


def fill(text: str, values: dict[str, str]) -> str:
    """``text`` with its expressions replaced."""

    def one(match: re.Match[str]) -> str:
        if match.group(1) not in values:
            sys.exit(f"run_workflow: nothing is known of {match.group(1)!r}; --set {match.group(1)}=VALUE")
        return values[match.group(1)]

    return EXPRESSION.sub(one, text)


def show(workflow: dict[str, Any]) -> None:
    """Every step, a line each."""
    for name, job in workflow["jobs"].items():
        print(f"{name}: {job.get('uses') or 'runs on ' + str(job['runs-on'])}")
        for number, step in enumerate(job.get("steps", []), start=1):
            what = f"run: {step['run'].strip().splitlines()[0]}" if "run" in step else f"uses: {step['uses']}"
            condition = f"  if {step['if']}" if "if" in step else ""
            print(f"  {number} {step.get('name', '')}: {what}{condition}")


def run(workflow: dict[str, Any], job: dict[str, Any], step: dict[str, Any], values: dict[str, str]) -> int:
    """Exit status of the script of a step."""
    if "run" not in step:
        sys.exit(f"run_workflow: this step uses {step['uses']}, which runs on GitHub only")
    layers = [scope.get("env", {}) for scope in (workflow, job, step)]
    environment = {name: fill(str(text), values) for layer in layers for name, text in layer.items()}
    with tempfile.TemporaryDirectory() as directory:
        files = {name: str(Path(directory, name)) for name in ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_STEP_SUMMARY")}
        done = subprocess.run(
            [*SHELL, fill(step["run"], values)], env={**os.environ, **files, **environment}, check=False
        )
        for name, path in files.items():
            if Path(path).exists():
                print(f"{name}: {Path(path).read_text()}", end="")
    return done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workflow", type=Path)
    parser.add_argument("job", nargs="?")
    parser.add_argument("steps", nargs="*", type=int, help="numbers; all scripts without")
    parser.add_argument("--set", action="append", default=[], metavar="EXPRESSION=VALUE")
    options = parser.parse_intermixed_args()
    workflow = yaml.safe_load(options.workflow.read_text())
    if options.job is None:
        return show(workflow)
    values = dict(pair.split("=", 1) for pair in options.set)
    job = workflow["jobs"][options.job]
    scripts = [number for number, step in enumerate(job["steps"], start=1) if "run" in step]
    for number in options.steps or scripts:
        step = job["steps"][number - 1]
        print(f"--- {options.job} {number}: {step.get('name', '')}", flush=True)
        if status := run(workflow, job, step, values):
            sys.exit(status)


if __name__ == "__main__":
    main()
