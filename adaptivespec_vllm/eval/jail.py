"""Runs a program that nobody trusts; started by :mod:`adaptivespec_vllm.eval.sandbox` as a process of its own.

The job comes on standard input, the verdict goes to the file descriptor named by the only argument. Before the program
runs, the process takes limits upon itself and gives up, for good, every system call that it does not need to compute:
it can open files for reading, allocate memory within its limit and start threads. It cannot write, create, rename or
delete files, open a socket, start a process or send a signal; such a call fails with "operation not permitted".
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import sys

UNCONFINED = "not confined: "
"""How the verdict begins where the program was not run, because it could not be confined."""

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EQUAL, _MASKED_EQUAL = 4, 7
_O_TMPFILE = 0o20000000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | _O_TMPFILE
_CLONE_THREAD = 0x10000
_TCGETS = 0x5401  # isatty

# Reading, memory, threads, clocks, what the interpreter asks about itself.
_FREE = """
read readv pread64 write close lseek fstat newfstatat stat lstat statx access faccessat faccessat2 readlink readlinkat
getdents64 getcwd dup fcntl poll ppoll select pselect6 pipe pipe2
brk mmap munmap mprotect mremap madvise
futex set_robust_list get_robust_list rseq sched_yield sched_getaffinity exit exit_group set_tid_address gettid
rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall
clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times
getpid getppid getuid geteuid getgid getegid getgroups getrusage sysinfo uname getrandom arch_prctl
"""


class _Compare(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def confine() -> None:
    """Give up everything that is not listed.

    Raises:
        OSError: libseccomp or the kernel cannot do it.

    """
    lib = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    lib.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(lib.seccomp_init(_ERRNO | errno.EPERM))
    if not context:
        raise OSError("seccomp is not there")

    def rule(name: str, *conditions: tuple[int, int, int, int], action: int = _ALLOW) -> None:
        number = lib.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # another processor's
            return
        compares = (_Compare * len(conditions))(*(_Compare(*condition) for condition in conditions))
        if lib.seccomp_rule_add_array(context, action, number, len(conditions), compares):
            raise OSError(f"no rule for {name}")

    for name in _FREE.split():
        rule(name)
    rule("open", (1, _MASKED_EQUAL, _WRITING, 0))
    rule("openat", (2, _MASKED_EQUAL, _WRITING, 0))
    rule("ioctl", (1, _EQUAL, _TCGETS, 0))
    rule("prlimit64", (0, _EQUAL, 0, 0), (2, _EQUAL, 0, 0))  # its own limits, to read
    rule("clone", (0, _MASKED_EQUAL, _CLONE_THREAD, _CLONE_THREAD))
    rule("clone3", action=_ERRNO | errno.ENOSYS)  # its flags cannot be seen from here; the C library falls back
    if lib.seccomp_load(context):
        raise OSError("the kernel refused the filter")


def limit(seconds: int, memory: int) -> None:
    """Processor time, address space, and no room in any file."""
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(what, (most, most))


def main() -> None:
    """Run the job and write what came of it."""
    out = int(sys.argv[1])
    job = json.load(sys.stdin)
    try:
        program = compile(job["program"], "<program>", "exec")
        limit(job["seconds"], job["memory"])
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        os.write(out, type(error).__name__.encode())
        os._exit(1)
    try:
        confine()
    except OSError as error:
        os.write(out, f"{UNCONFINED}{error}".encode())
        os._exit(1)
    try:
        exec(program, {"__name__": "__main__"})
    except BaseException as error:
        os.write(out, type(error).__name__.encode())
        os._exit(1)
    os.write(out, job["word"].encode())
    os._exit(0)


if __name__ == "__main__":
    main()
