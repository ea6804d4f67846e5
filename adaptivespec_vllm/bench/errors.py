"""The one error of bad input (which option, what was given, what is allowed), and what is said of any other."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

from adaptivespec_vllm.config import ConfigError, reason, shortened
from adaptivespec_vllm.screen import tail

_LONGEST = 240
"""Characters of what was given that are repeated; enough for a path."""


class BadInput(ValueError):
    """An option that cannot be used; its text is one sentence, shown without a traceback."""

    def __init__(self, option: str, given: Any, allowed: str) -> None:
        what = shortened(json.dumps(given, ensure_ascii=False), _LONGEST) if given is not None else "nothing"
        super().__init__(f"{option}: got {what}; allowed: {allowed}")


def failure_of(error: Exception, log: Path) -> tuple[str, int]:
    """What a command that started engines says of an error, and its exit status; to be called where it is handled."""
    notes = getattr(error, "__notes__", ())
    if isinstance(error, (BadInput, ConfigError)):
        return " ".join([*notes, str(error)]), 2
    # The engine may fail in any way; the user gets the cause and the log.
    told = f"{': '.join([*notes, reason(error)])}\n\nlast lines of {log}:\n{tail(log)}"
    traceback.print_exc()  # for the log alone
    return told, 1
