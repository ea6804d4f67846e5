"""The sandbox against programs that mean harm. Each is bounded by itself, so that a sandbox that fails harms nothing,
and none addresses anything but the loopback interface and files of the test."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptivespec_vllm.eval import sandbox
from adaptivespec_vllm.eval.sandbox import Limits, run

try:
    sandbox.check()
except sandbox.SandboxUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

SHORT = Limits(seconds=3, memory=1 << 29)


def test_an_honest_program_passes() -> None:
    outcome = run("import math, re, typing, collections, hashlib, threading\nassert math.gcd(12, 18) == 6\nprint('x')")
    assert (outcome.passed, outcome.why) == (True, "")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "killed"),  # it never said that it came to its end
        ("import ctypes\nctypes.string_at(0)", "killed"),
    ],
)
def test_a_program_that_does_not_come_to_its_end_fails(program: str, why: str) -> None:
    outcome = run(program)
    assert (outcome.passed, outcome.why) == (False, why)


def test_threads_are_no_processes() -> None:
    assert run("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()").passed


CHILDREN = """
import {module}
for _ in range(20):
    {start}
"""


@pytest.mark.parametrize(
    ("module", "start"),
    [
        ("os", "os.fork() or os._exit(0)"),
        ("os", "os.posix_spawn('/bin/true', ['true'], {})"),
        ("subprocess", "subprocess.run(['true'])"),
        ("multiprocessing", "multiprocessing.Process(target=print).start()"),
        ("os", "os.execv('/bin/true', ['true'])"),
    ],
)
def test_no_child_is_started(module: str, start: str) -> None:
    outcome = run(CHILDREN.format(module=module, start=start), SHORT)
    assert (outcome.passed, outcome.why) == (False, "PermissionError")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        yield server


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_no_connection_to_a_listener_on_this_machine(listener: socket.socket, kind: str) -> None:
    port = listener.getsockname()[1]
    program = (
        f"import socket\ns = socket.socket(socket.AF_INET, socket.{kind})\ns.settimeout(1)\n"
        f"s.connect(('127.0.0.1', {port}))\ns.send(b'x')"
    )
    # Without a sandbox it does what it says.
    subprocess.run([sys.executable, "-c", program], check=True, timeout=10)
    if kind == "SOCK_STREAM":
        listener.accept()[0].close()
    outcome = run(program, SHORT)
    assert (outcome.passed, outcome.why) == (False, "PermissionError")
    with pytest.raises(TimeoutError):
        listener.accept()


@pytest.mark.parametrize(
    "deed",
    [
        "open(new, 'w').write('x')",
        "open(old, 'a').write('x')",
        "open(old, 'r+').write('x')",
        "os.unlink(old)",
        "os.rename(old, new)",
        "os.symlink(old, new)",
        "os.link(old, new)",
        "os.mkdir(new)",
        "os.chmod(old, 0)",
        "os.truncate(old, 0)",
        "os.utime(old, (0, 0))",
        "os.mkfifo(new)",
        "__import__('shutil').rmtree(os.path.dirname(old))",
        "__import__('sqlite3').connect(new).execute('create table t (x)')",
    ],
)
def test_nothing_outside_is_written_changed_or_deleted(tmp_path: Path, deed: str) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("as it was")
    before = old.stat()
    outcome = run(f"import os\nold, new = {str(old)!r}, {str(new)!r}\n{deed}", SHORT)
    assert not outcome.passed and outcome.why not in ("time", "NameError", "SyntaxError")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    after = old.stat()
    assert old.read_text() == "as it was"
    assert (after.st_mode, after.st_mtime, after.st_nlink) == (before.st_mode, before.st_mtime, before.st_nlink)


def test_nothing_is_left_of_its_directory() -> None:
    before = {path.name for path in Path("/tmp").glob("adaptivespec-*")}
    assert not run("open('here', 'w').write('x')", SHORT).passed
    assert {path.name for path in Path("/tmp").glob("adaptivespec-*")} <= before


def test_memory_is_limited() -> None:
    assert run("x = bytearray(1 << 30)", SHORT).why == "MemoryError"
    assert run("x = bytearray(1 << 20)", SHORT).passed


@pytest.mark.parametrize("loop", ["end = time.time() + 60\nwhile time.time() < end: pass", "time.sleep(60)"])
def test_an_endless_loop_ends(loop: str) -> None:
    started = time.perf_counter()
    outcome = run(f"import time\n{loop}", Limits(seconds=1))
    assert (outcome.passed, outcome.why) == (False, "time")
    assert time.perf_counter() - started < 30


def test_no_signal_reaches_another_process() -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    try:
        outcome = run(f"import os, signal\nos.kill({victim.pid}, signal.SIGKILL)", SHORT)
        assert (outcome.passed, outcome.why) == (False, "PermissionError")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_limits_of_other_processes_stay() -> None:
    program = "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0))"
    assert run(program, SHORT).why == "PermissionError"


def test_a_flood_of_output_goes_nowhere() -> None:
    assert run(
        "import sys\nfor _ in range(100): print('x' * 10_000); print('x' * 10_000, file=sys.stderr)", SHORT
    ).passed


def test_the_verdict_cannot_be_flooded_nor_guessed() -> None:
    program = "import os\nfor fd in range(3, 1 << 16):\n    try: os.write(fd, b'passed')\n    except OSError: pass"
    assert not run(program, SHORT).passed
    flood = "import os\nfor fd in range(3, 1 << 16):\n    try: os.write(fd, b'x' * (1 << 20))\n    except OSError: pass"
    assert not run(flood, Limits(seconds=1)).passed


def test_what_cannot_be_confined_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "jail.py"
    broken.write_text(Path(sandbox._JAIL).read_text().replace("libseccomp.so.2", "libnothing.so.2"))
    monkeypatch.setattr(sandbox, "_JAIL", str(broken))
    with pytest.raises(sandbox.SandboxUnavailable, match=r"not confined: libnothing.*libseccomp2"):
        run("raise SystemExit")


def test_the_environment_does_not_come_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("import os\nassert 'HF_TOKEN' not in os.environ").passed
