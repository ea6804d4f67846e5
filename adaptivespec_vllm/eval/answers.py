"""Answers on disk: a line for each, complete or not there, so that a run that was killed goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.config import shortened

FILE = "answers.jsonl"
SETTINGS = "settings.json"

Key = tuple[str, str, str]
"""Arm, task, id of the question."""


class Answer(BaseModel):
    """An answer and what it took.

    Attributes:
        tokens: their ids.
        losses: of each token that was not the target's first choice, its place and the nats that it gave up; None of a
            text that was drawn.
        finish: why it ended: "stop" or "length".
        correct: None where nothing says.
        seconds: its share of the time of its batch.
        steps: its share of the steps of its batch (a step of each request counts); None where they are not counted.

    """

    model_config = ConfigDict(extra="forbid")

    arm: str
    task: str
    id: str
    text: str
    tokens: list[int]
    losses: list[tuple[int, float]] | None
    finish: str
    correct: bool | None
    why: str = ""
    seconds: float
    steps: float | None = None

    @property
    def key(self) -> Key:
        return (self.arm, self.task, self.id)


class Answers:
    """The answers of a run.

    Args:
        directory: of the run, which exists.
        settings: whatever changes answers; those of a run that goes on must be the same.

    Raises:
        BadInput: the directory holds a run with other settings.

    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self.path = directory / FILE
        _same_settings(directory / SETTINGS, settings)
        self.rows: dict[Key, Answer] = {}
        kept = self._read()
        self._file = self.path.open("ab")
        self._file.truncate(kept)

    def add(self, answer: Answer) -> None:
        """Keep an answer; it is on disk when this returns."""
        self._file.write(answer.model_dump_json().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows[answer.key] = answer

    def close(self) -> None:
        """No more answers come."""
        self._file.close()

    def _read(self) -> int:
        """Read what is there; bytes up to the end of the last line that is whole."""
        if not self.path.exists():
            return 0
        kept = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                answer = Answer.model_validate_json(line)
            except ValueError:
                break
            self.rows.setdefault(answer.key, answer)
            kept += len(line)
        return kept


def _same_settings(path: Path, settings: dict[str, Any]) -> None:
    """Settings of a new run are written; those of one that goes on may have more arms and tasks, but none changed."""
    settings = json.loads(json.dumps(settings))
    before: dict[str, Any] = {}
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise BadInput("--output", str(path), "the settings of a run") from None
    for name, value in before.items():
        now = settings.get(name)
        if isinstance(value, dict) and isinstance(now, dict):  # arms and tasks: more may come
            same = all(value[key] == now[key] for key in value.keys() & now.keys())
            settings[name] = {**value, **now}
        else:
            same = value == now
        if not same:
            was = shortened(json.dumps(value), 120)
            raise BadInput("--output", str(path.parent), f"a run with the same {name}; that one has {was}")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    temporary.replace(path)
