"""What steps really take, learnt while decoding.

Measured passes repeat one number of rows; in use these change from step to step, other memory has been read in between,
and a step has parts that are not modelled. What a step took beyond its modelled parts is therefore kept by the rows of
its target pass, and the costs that the policy goes by follow it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable

Residuals = list[tuple[int, float]]
"""(rows of the target's pass, seconds beyond the modelled ones), by rows."""

STEPS = 64
"""Steps between two answers."""

_KEPT = 32
"""Steps of one number of rows whose median counts: no outlier does."""

_ENOUGH = 8
"""Steps of one number of rows that say something."""


class StepTimes:
    """Times of the steps of a worker that only decode."""

    def __init__(self) -> None:
        self._beyond: dict[int, deque[float]] = {}
        self._seen = 0
        self._began = 0.0
        self._requests: frozenset[str] = frozenset()
        self._step: tuple[int, float] | None = None

    def begin(self, requests: Iterable[str]) -> Residuals | None:
        """A step begins; the residuals, when enough steps have been seen since the last answer.

        Only the time between two steps of the same requests counts: with others, the engine may have waited for them.
        """
        now, same = time.perf_counter(), frozenset(requests)
        if self._step is not None and same == self._requests:
            rows, expected = self._step
            self._beyond.setdefault(rows, deque(maxlen=_KEPT)).append(now - self._began - expected)
            self._seen += 1
        self._began, self._requests, self._step = now, same, None
        if self._seen < STEPS:
            return None
        known = [(rows, statistics.median(kept)) for rows, kept in self._beyond.items() if len(kept) >= _ENOUGH]
        if not known:
            return None
        self._seen = 0
        return sorted(known)

    def end(self, rows: int, expected: float) -> None:
        """A step that only decoded ends.

        Args:
            rows: of its target pass.
            expected: seconds of its modelled parts, as they were measured at start.

        """
        self._step = rows, expected
