"""The one error of bad input: which option, what was given, what is allowed."""

from __future__ import annotations

import json
from typing import Any

from adaptivespec_vllm.config import shortened

_LONGEST = 240
"""Characters of what was given that are repeated; enough for a path."""


class BadInput(ValueError):
    """An option that cannot be used; its text is one sentence, shown without a traceback."""

    def __init__(self, option: str, given: Any, allowed: str) -> None:
        what = shortened(json.dumps(given, ensure_ascii=False), _LONGEST) if given is not None else "nothing"
        super().__init__(f"{option}: got {what}; allowed: {allowed}")
