"""The one error a user of the demo meets: what went wrong, and what to do about it."""

from __future__ import annotations


class DemoError(Exception):
    """A failure with a remedy; shown as two lines, without a traceback."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy
