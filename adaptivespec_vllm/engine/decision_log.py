"""Every decision of the policy as a line of JSON, for replay; off unless asked for.

``VLLM_ADAPTIVESPEC_DECISION_LOG=FILE`` makes the first worker append to FILE. A line holds a request id and numbers,
nothing of any text. ``policy.replay`` computes logged decisions again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from adaptivespec_vllm.policy.base import Decision

VARIABLE = "VLLM_ADAPTIVESPEC_DECISION_LOG"


class DecisionLog:
    """Appends decisions to a file, a line each, complete at every step."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    @staticmethod
    def from_environment() -> DecisionLog | None:
        """The log that the environment asks for."""
        path = os.environ.get(VARIABLE)
        return DecisionLog(Path(path)) if path else None

    def write(self, requests: Sequence[str], decisions: Sequence[Decision]) -> None:
        """Log one step."""
        lines = (
            json.dumps({"request": request} | decision.to_dict()) + "\n"
            for request, decision in zip(requests, decisions, strict=True)
        )
        self._file.write("".join(lines))


def read_log(path: Path) -> list[Decision]:
    """The decisions of a log."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [Decision.from_dict({k: v for k, v in row.items() if k != "request"}) for row in rows]
