"""Runs the instructions of a Dockerfile without a container engine, each stage in a directory of its own under chroot.

    run_dockerfile.py build docker/Dockerfile.cpu --base BASE --output IMAGE [--context .] [--resume]
    run_dockerfile.py run IMAGE [COMMAND...]       # its CMD, or COMMAND, as the image's user with its environment
    run_dockerfile.py health IMAGE                 # its HEALTHCHECK once

BASE is a root file system that stands for the base image, as debootstrap makes one; it is copied, never changed. Needs
root. --resume leaves out what an interrupted build of the same file had done. What a machine needs to reach packages is
added by --bind DIRECTORY and --env NAME=VALUE, before the command. RUN --mount is refused.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SILENT = {"LABEL", "EXPOSE", "VOLUME", "COMMENT"}

MOUNT_AND_CHROOT = """
set -e
root=$1 user=$2 binds=$3; shift 3
mount -t proc proc "$root/proc"
for directory in /sys /dev $binds; do
    mkdir -p "$root$directory"
    mount --rbind "$directory" "$root$directory"
done
exec chroot --userspec="$user" "$root" "$@"
"""


class Refused(Exception):
    """An instruction that this script does not know how to run."""


@dataclass
class Image:
    """A root file system, and what is to be run in it."""

    root: str
    env: dict[str, str] = field(default_factory=lambda: {"PATH": DEFAULT_PATH})
    user: str = "0:0"
    workdir: str = "/"
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)

    def inside(self, command: list[str], binds: list[str], extra: dict[str, str]) -> list[str]:
        """The command that runs ``command`` inside; one process, so that a signal reaches it."""
        environment = {"HOME": self.home(), **self.env, **extra}
        return [
            "unshare", "--mount", "--propagation", "private",
            "sh", "-c", MOUNT_AND_CHROOT, "sh", self.root, self.user, " ".join(binds),
            "env", "-i", "-C", self.workdir, *(f"{name}={value}" for name, value in environment.items()), *command,
        ]  # fmt: skip

    def home(self) -> str:
        """Home directory of its user."""
        identity = self.user.split(":")[0]
        for line in Path(self.root, "etc/passwd").read_text().splitlines():
            fields = line.split(":")
            if identity in (fields[0], fields[2]):
                return fields[5]
        return "/"

    def place(self, path: str) -> Path:
        """Where a path of the image lies."""
        return Path(self.root, str(Path(self.workdir, path)).lstrip("/"))


def arguments_of(value: str, shell: list[str]) -> list[str]:
    """A command in the form of JSON, or as one of the shell."""
    return json.loads(value) if value.lstrip().startswith("[") else [*shell, value]


def expand(text: str, *scopes: dict[str, str]) -> str:
    return string.Template(text).safe_substitute({name: value for scope in scopes for name, value in scope.items()})


def copy(image: Image, sources: list[Path], target: str) -> None:
    """COPY: files beside each other into a directory, contents of a directory into a directory."""
    destination = image.place(target)
    for source in sources:
        if source.is_dir():
            subprocess.run(["cp", "-a", "--no-target-directory", source, _made(destination)], check=True)
        elif target.endswith("/"):
            shutil.copy(source, _made(destination))
        else:
            _made(destination.parent)
            shutil.copy(source, destination)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@dataclass
class Build:
    """One run through a Dockerfile."""

    base: Path
    output: Path
    context: Path
    binds: list[str]
    extra: dict[str, str]
    done: list[str]
    stages: dict[str, Image] = field(default_factory=dict)
    image: Image | None = None
    args: dict[str, str] = field(default_factory=dict)

    def step(self, instruction: str, value: str) -> None:
        if instruction in SILENT:
            return
        method = getattr(self, "from_" if instruction == "FROM" else instruction.lower(), None)
        if method is None or (self.image is None and instruction not in ("FROM", "ARG")):
            raise Refused(f"{instruction} {value}")
        method(value)

    def arg(self, value: str) -> None:
        name, _, default = value.partition("=")
        self.args[name] = shlex.split(default)[0] if default else ""

    def from_(self, value: str) -> None:
        words = value.split()
        name = words[2] if len(words) == 3 else str(len(self.stages))
        root = self.output / name
        if not self.was_done(f"FROM {name}"):
            if root.exists():
                shutil.rmtree(root)
            subprocess.run(["cp", "-a", self.base, root], check=True)
            shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
            self.now_done(f"FROM {name}")
        self.image = self.stages[name] = Image(str(root))

    def run(self, value: str) -> None:
        assert self.image
        if value.startswith("--"):
            raise Refused(f"RUN {value.split()[0]}")
        if self.was_done(value):
            return
        command = self.image.inside([*self.image.shell, value], self.binds, {**self.args, **self.extra})
        status = subprocess.run(command, check=False).returncode
        if status:
            sys.exit(f"exit status {status}: RUN {value}")
        self.now_done(value)

    def was_done(self, what: str) -> bool:
        return what in self.done

    def now_done(self, what: str) -> None:
        self.done.append(what)
        (self.output / "done.json").write_text(json.dumps(self.done))

    def copy(self, value: str) -> None:
        assert self.image
        words = shlex.split(value)
        options = [word for word in words if word.startswith("--")]
        *sources, target = [word for word in words if not word.startswith("--")]
        above = self.context
        for option in options:
            name, _, stage = option.partition("=")
            if name != "--from":
                raise Refused(f"COPY {option}")
            above = Path(self.stages[stage].root)
        copy(self.image, [above / source.lstrip("/") for source in sources], target)

    def env(self, value: str) -> None:
        assert self.image
        for word in shlex.split(expand(value, self.args, self.image.env)):
            name, _, text = word.partition("=")
            self.image.env[name] = text

    def workdir(self, value: str) -> None:
        assert self.image
        _made(self.image.place(value))
        self.image.workdir = value

    def user(self, value: str) -> None:
        assert self.image
        self.image.user = value

    def shell(self, value: str) -> None:
        assert self.image
        self.image.shell = json.loads(value)

    def cmd(self, value: str) -> None:
        assert self.image
        self.image.cmd = arguments_of(value, self.image.shell)

    def entrypoint(self, value: str) -> None:
        assert self.image
        self.image.entrypoint = arguments_of(value, self.image.shell)

    def healthcheck(self, value: str) -> None:
        assert self.image
        self.image.healthcheck = arguments_of(value.partition("CMD")[2].strip(), self.image.shell)


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    from dockerfile_parse import DockerfileParser

    for entry in DockerfileParser(fileobj=io.BytesIO(dockerfile.read_bytes())).structure:
        yield entry["instruction"], entry["value"]


def build(options: argparse.Namespace, extra: dict[str, str]) -> None:
    """All stages, and beside them what is known of the last one."""
    output = _made(options.output.resolve())
    kept = output / "done.json"
    done = json.loads(kept.read_text()) if options.resume and kept.exists() else []
    walk = Build(options.base.resolve(), output, options.context.resolve(), options.bind, extra, done)
    for instruction, value in instructions(options.dockerfile):
        print(f"--- {instruction} {value}", flush=True)
        walk.step(instruction, value)
    assert walk.image
    (output / "image.json").write_text(json.dumps(asdict(walk.image), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bind", action="append", default=[], metavar="DIRECTORY")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    commands = parser.add_subparsers(dest="command", required=True)
    of_build = commands.add_parser("build")
    of_build.add_argument("dockerfile", type=Path)
    of_build.add_argument("--base", type=Path, required=True)
    of_build.add_argument("--output", type=Path, required=True)
    of_build.add_argument("--resume", action="store_true")
    of_build.add_argument("--context", type=Path, default=Path("."))
    for name in ("run", "health"):
        commands.add_parser(name).add_argument("image", type=Path)
    commands.choices["run"].add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    extra = dict(pair.split("=", 1) for pair in options.env)
    if options.command == "build":
        build(options, extra)
        return
    image = Image(**json.loads((options.image / "image.json").read_text()))
    if options.command == "health":
        command = image.healthcheck
    else:
        command = [*image.entrypoint, *(options.arguments or image.cmd)]
    command = image.inside(command, options.bind, extra)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
