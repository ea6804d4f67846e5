"""What ``run.sh`` runs: every part in a process of its own with a time limit, so that no failure hides another."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu import report

ROOT = Path(__file__).resolve().parents[2]
OPS = ("build_tree", "walk_trees", "topk_logprobs", "tree_attention", "tree_part_attention", "commit_kv")
BUDGET = 230.0
"""Seconds for everything; what has not begun by then is reported as failed."""

LIMITS = {"machine": 60, "build": 150, "op": 60, "attention": 60, "sanitizer": 60}
"""Seconds of one part, of a whole budget."""


class Run:
    """The parts that have run, and what is left of the time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.monotonic()
        self.results: list[dict[str, Any]] = []
        self.environment = dict(os.environ)

    def part(self, kind: str, name: str, command: list[str]) -> dict[str, Any]:
        """Run a command: the last line of output that is JSON is its result, its exit status the rest."""
        left = self.options.budget - (time.monotonic() - self.started)
        limit = LIMITS[kind] * self.options.budget / BUDGET
        result: dict[str, Any] = {"kind": kind, "name": name, "error": None}
        self.results.append(result)
        begun = time.monotonic()
        if left < 5:
            return self._failed(result, "no time left")
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False,
                timeout=min(limit, left),
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return self._failed(result, f"took more than {error.timeout:.0f} s")
        except OSError as error:
            return self._failed(result, str(error))
        result["seconds"] = round(time.monotonic() - begun, 1)
        lines = done.stdout.strip().splitlines()
        said = next((each for each in reversed(lines) if each.startswith("{")), "{}")
        result.update(json.loads(said))
        refused = next((each for each in lines if "Device not supported" in each), None)
        if kind == "sanitizer" and refused:  # as on some virtual machines
            result.update(error=None, skipped=refused.strip("= "))
        elif done.returncode and result["error"] is None:
            end = (done.stdout + done.stderr).strip().splitlines()[-12:]
            result["error"] = "\n".join([f"exit status {done.returncode}", *end])
        return self._say(result)

    def _say(self, result: dict[str, Any]) -> dict[str, Any]:
        print(report.line(result), flush=True)
        return result

    def _failed(self, result: dict[str, Any], error: str) -> dict[str, Any]:
        result["error"] = error
        return self._say(result)

    def inner(self, kind: str, name: str, *wrapper: str, seeds: int | None = None) -> dict[str, Any]:
        """A part of this package, in a new process."""
        count = self.options.seeds if seeds is None else seeds
        command = [sys.executable, "-m", "tests.gpu.part", kind, name, self.options.device, str(count)]
        return self.part(kind, name, [*wrapper, *command])


def build(run: Run, capability: str | None) -> None:
    """The native modules in place; on CUDA for the GPU that is here."""
    cuda = run.options.device == "cuda"
    if not cuda and any((ROOT / "adaptivespec_vllm").glob("_C.*so")):
        return
    run.environment["VLLM_ADAPTIVESPEC_NO_NATIVE"] = "0"
    if capability:
        run.environment["TORCH_CUDA_ARCH_LIST"] = capability
    run.part("build", "setup.py build_ext", [sys.executable, "setup.py", "build_ext", "--inplace"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description="Checks and times the CUDA ops.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with the CPU ops")
    parser.add_argument("--seeds", type=int, default=20, help="random cases an op (default 20)")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the results go (default gpu.json)")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything (default 230)")
    parser.add_argument("--only", choices=OPS, action="append", help="these ops alone")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    run = Run(options)
    chosen = options.only or OPS
    machine = run.inner("machine", "machine")
    build(run, machine.get("capability"))
    for name in chosen:
        run.inner("op", name)
    for name in () if options.only else machine.get("attention", ()):
        run.inner("attention", name)
    if options.device == "cuda" and (sanitizer := shutil.which("compute-sanitizer")):
        memcheck = (sanitizer, "--tool", "memcheck", "--error-exitcode", "9")
        run.inner("sanitizer", " ".join(chosen), *memcheck, seeds=2)

    seconds = round(time.monotonic() - run.started, 1)
    print("\n" + "\n".join(report.table(run.results, options.device)))
    failed = [result for result in run.results if result["error"]]
    host = {"host": platform.platform(), "python": platform.python_version(), "device": options.device}
    options.json.write_text(json.dumps(host | {"seconds": seconds, "parts": run.results}, indent=1) + "\n")
    print(f"\n{len(run.results) - len(failed)} passed, {len(failed)} failed, {seconds} s, written to {options.json}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
