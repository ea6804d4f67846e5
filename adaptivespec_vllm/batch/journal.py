"""Answers on disk as they come, so that a run that was stopped goes on, and the output in the order of the input."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from adaptivespec_vllm.config import ConfigError

SUFFIX = ".partial"
"""Behind the output's name, until the output is complete."""


class Journal:
    """The file of answers in the order in which they came; one line of the input is answered once.

    The first line says what the run was asked for; each other line holds the line of the input and its answer.

    Attributes:
        done: lines of the input that are answered, with the place of the answer in the file.

    """

    def __init__(self, output: Path, asked: Mapping[str, Any], lines: set[int]) -> None:
        self.output, self.path = output, output.with_name(output.name + SUFFIX)
        self.done: dict[int, int] = {}
        self._lines = lines
        first = {"asked": hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()}
        try:
            self._file = open(self.path, "a+b")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written ({error.strerror})") from None
        self._go_on(first)

    def _go_on(self, first: dict[str, str]) -> None:
        """Take over what is there; the last line may have been cut off."""
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                break
            entry = json.loads(line)
            if number and entry["line"] in self._lines:
                self.done.setdefault(entry["line"], whole)
            elif not number and entry != first:
                raise ConfigError(
                    f"{self.path}: left by a run with another input or other settings; allowed: the same, or --restart"
                )
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
        if not whole:
            self._append(first)

    def add(self, line: int, answer: Mapping[str, Any]) -> bool:
        """Keep an answer; False where the line is answered already, as when a task was done twice."""
        if line in self.done:
            return False
        self.done[line] = self._file.tell()
        self._append({"line": line, "answer": answer})
        return True

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def finish(self) -> dict[str, int]:
        """Write the output in the order of the input, whole or not at all; how many were answered and refused."""
        counts = {"answered": 0, "refused": 0}
        whole = self.output.with_name(self.output.name + ".whole")
        with whole.open("wb") as file:
            for line in sorted(self.done):
                self._file.seek(self.done[line])
                answer = json.loads(self._file.readline())["answer"]
                counts["answered" if answer["response"]["status_code"] == 200 else "refused"] += 1
                file.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        whole.replace(self.output)
        self.path.unlink()
        return counts

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
