"""Compiles the CUDA sources for each architecture and prints what every kernel takes, as the assembler reports it.

    python scripts/cuda_resources.py                      # sm_80, sm_90, sm_100
    python scripts/cuda_resources.py --architectures 9.0 --json resources.json

Exits with 1 if a source does not compile or a kernel spills registers.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from nvcc import DEFAULT_ARCHITECTURES, ROOT, compile_sources, find_toolkit

OBJECTS = ROOT / "build" / "cuda"


class Kernel(NamedTuple):
    """A kernel of one source on one architecture; memory in bytes."""

    source: str
    name: str
    architecture: str
    registers: int
    shared: int
    stack: int
    spilled: int


ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def kernels_of(source: str, report: str) -> Iterator[Kernel]:
    """The kernels in what ``ptxas -v`` wrote."""
    entry, stack, spilled = None, 0, 0
    for line in report.splitlines():
        if match := ENTRY.search(line):
            entry, stack, spilled = match.groups(), 0, 0
        elif entry and (match := MEMORY.search(line)):
            stack, stores, loads = map(int, match.groups())
            spilled = stores + loads
        elif entry and (match := USED.search(line)):
            shared = SHARED.search(line)
            yield Kernel(
                source, readable(entry[0]), entry[1], int(match.group(1)), int(shared.group(1)) if shared else 0,
                stack, spilled,
            )  # fmt: skip
            entry = None


def readable(mangled: str) -> str:
    """A kernel's own name with its template arguments, from its mangled one."""
    if shutil.which("c++filt") is None:
        return mangled
    plain = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    plain = plain.removeprefix("void ")
    for scope in ("adaptivespec::cuda::", "(anonymous namespace)::", "adaptivespec::", "(int)"):
        plain = plain.replace(scope, "")
    return plain.split("(")[0]


def table(kernels: Iterable[Kernel]) -> Iterator[str]:
    """One line a kernel: registers on each architecture, static shared memory, stack, spilled bytes of all."""
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.source, kernel.name), []).append(kernel)
    architectures = sorted({k.architecture for group in groups.values() for k in group}, key=lambda name: int(name[3:]))
    columns = "".join(f"{name:>8}" for name in architectures)
    yield f"{'kernel':<28}{columns}{'shared':>9}{'stack':>7}{'spilled':>9}"
    for (_, name), group in groups.items():
        registers = {kernel.architecture: kernel.registers for kernel in group}
        cells = "".join(f"{registers.get(each, '-'):>8}" for each in architectures)
        shared, stack = max(k.shared for k in group), max(k.stack for k in group)
        yield f"{name:<28}{cells}{shared:>9}{stack:>7}{sum(k.spilled for k in group):>9}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", default=DEFAULT_ARCHITECTURES)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    toolkit = find_toolkit()
    if toolkit is None:
        print("no nvcc: set CUDA_HOME, or install a CUDA toolkit", file=sys.stderr)
        return 1
    try:
        compiled = compile_sources(toolkit, options.architectures, OBJECTS, options.jobs)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    kernels = [kernel for each in compiled for kernel in kernels_of(each.source, each.report)]
    print("\n".join(table(kernels)))
    print(f"CUDA {toolkit.version}; seconds: {', '.join(f'{Path(c.source).stem} {c.seconds:.0f}' for c in compiled)}")
    if options.json:
        seconds = {each.source: each.seconds for each in compiled}
        report = {"cuda": toolkit.version, "kernels": [k._asdict() for k in kernels], "seconds": seconds}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(kernel.spilled for kernel in kernels))


if __name__ == "__main__":
    sys.exit(main())
