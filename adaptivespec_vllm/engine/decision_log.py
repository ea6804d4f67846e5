"""Every call of the policy and what came of it as a line of JSON, for replay; off unless asked for.

``VLLM_ADAPTIVESPEC_DECISION_LOG=FILE`` makes the first worker append to FILE. A line holds request ids and numbers,
nothing of any text. ``policy.replay`` computes logged decisions again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.policy.recording import Event

VARIABLE = "VLLM_ADAPTIVESPEC_DECISION_LOG"


class DecisionLog:
    """Appends events to a file, a line each, complete at every event."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"{VARIABLE}: {path} cannot be written ({error.strerror}); allowed: a file") from None

    @staticmethod
    def from_environment() -> DecisionLog | None:
        """The log that the environment asks for."""
        path = os.environ.get(VARIABLE)
        return DecisionLog(Path(path)) if path else None

    def write(self, event: Event) -> None:
        """Log one event."""
        self._file.write(json.dumps(event) + "\n")


def read_log(path: Path) -> list[Event]:
    """The events of a log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
