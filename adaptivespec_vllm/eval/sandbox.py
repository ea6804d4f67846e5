"""Generated code, run where it can do no harm: a process of its own, confined by :mod:`adaptivespec_vllm.eval.jail`.

It keeps honest mistakes and the usual mischief of generated code away from the machine. Code that knew of the sandbox
could still claim to have passed, and could read (not send) whatever this user can read.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from adaptivespec_vllm.eval import jail
from adaptivespec_vllm.eval.jail import UNCONFINED

_JAIL = str(jail.__file__)
_LONGEST_VERDICT = 256


class SandboxUnavailable(RuntimeError):
    """This machine cannot confine a process: no Linux, no libseccomp, or a kernel without seccomp."""


@dataclass(frozen=True)
class Limits:
    """What a program may take.

    Attributes:
        seconds: of processor time, and of waiting, each.
        memory: bytes of address space.

    """

    seconds: int = 10
    memory: int = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        passed: it ran to its end without an exception, within its limits.
        why: the exception's name, "time", "killed", or "" of one that passed.
        seconds: that it took.

    """

    passed: bool
    why: str
    seconds: float


def run(program: str, limits: Limits | None = None) -> Outcome:
    """Run a Python program to its end or its limits.

    Raises:
        SandboxUnavailable: it was not run at all.

    """
    limits = limits or Limits()
    word = secrets.token_hex(16)
    job = {"program": program, "word": word, "seconds": limits.seconds, "memory": limits.memory}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="adaptivespec-") as directory:
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", _JAIL, str(write)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(write,),
                cwd=directory,
                env={"HOME": directory, "TMPDIR": directory, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            os.close(write)
            try:
                process.communicate(json.dumps(job).encode(), timeout=limits.seconds)
                verdict = os.read(read, _LONGEST_VERDICT).decode(errors="replace")
            except subprocess.TimeoutExpired:
                verdict = "time"
            finally:
                process.kill()
                process.communicate()
        finally:
            os.close(read)
    if verdict.startswith(UNCONFINED):
        raise SandboxUnavailable(
            f"generated code is not run, since it is {verdict}; needed: Linux with seccomp, and libseccomp2"
        )
    passed = verdict == word
    return Outcome(passed, "" if passed else verdict or "killed", time.perf_counter() - started)


def check() -> None:
    """Find out whether code can be run here.

    Raises:
        SandboxUnavailable: it cannot.

    """
    if not run("pass").passed:
        raise SandboxUnavailable("generated code is not run: an empty program does not pass in the sandbox")
