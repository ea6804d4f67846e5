"""What steps really take, learnt while decoding.

Measured passes repeat one number of rows; in use these change from step to step, other memory has been read in between,
and a step has parts that are not modelled. What a step took beyond its modelled parts is therefore kept, and the costs
that the policy goes by follow it: of plain steps by their requests, of steps that verify drafts by the rows of the
target's pass. Only both together say what drafting costs, so a worker whose requests always draft leaves it out for a
few steps now and then.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

STEPS = 64
"""Steps between two answers."""

_KEPT = 32
"""Steps of one number of rows whose median counts: no outlier does."""

ENOUGH = 8
"""Steps of one number of rows that say something."""

SOON = 32
"""Steps with drafts until plain ones are looked at for the first time; of a size of batch, as all below."""

LATER = 512
"""Steps with drafts until they are looked at again."""

FORGOTTEN = 2048
"""Steps after which one with drafts no longer counts: a machine that was busy then may have time again."""

_LONGEST = 2 * ENOUGH
"""Steps without drafts in a row, if requests come and go so fast that few of them can be timed."""


@dataclass(frozen=True)
class Residuals:
    """Seconds beyond the modelled ones.

    Attributes:
        plain: (requests, seconds) of steps without drafts.
        drafting: (rows of the target's pass, seconds) of those with drafts, beyond plain ones of as many requests.

    """

    plain: list[tuple[int, float]]
    drafting: list[tuple[int, float]]


@dataclass
class _Size:
    """Batches of about one size: up to twice as many requests.

    Attributes:
        drafting: steps since enough plain ones were timed.
        plain: those that were timed since.
        due: ``drafting`` from which on drafting is left out.

    """

    drafting: int = 0
    plain: int = 0
    due: int = SOON

    def known(self) -> None:
        self.drafting, self.plain, self.due = 0, 0, LATER


@dataclass(frozen=True)
class _Step:
    requests: int
    rows: int
    expected: float


@dataclass(frozen=True)
class _Drafted:
    """The time of a step that verified drafts.

    Attributes:
        at: number of the step.
        requests: of the batch.
        beyond: seconds beyond the modelled ones.

    """

    at: int
    requests: int
    beyond: float


@dataclass
class StepTimes:
    """Times of the steps of a worker that only decode."""

    _plain: dict[int, deque[float]] = field(default_factory=dict)
    _drafting: dict[int, deque[_Drafted]] = field(default_factory=dict)
    _sizes: dict[int, _Size] = field(default_factory=dict)
    _kept: int = 0
    _seen: int = 0
    _began: float = 0.0
    _requests: frozenset[str] = frozenset()
    _step: _Step | None = None

    def begin(self, requests: Iterable[str]) -> Residuals | None:
        """A step begins; the residuals, when enough steps have been seen since the last answer.

        Only the time between two steps of the same requests counts: with others, the engine may have waited for them.
        """
        now, same = time.perf_counter(), frozenset(requests)
        if self._step is not None and same == self._requests:
            self._keep(self._step, now - self._began)
        self._began, self._requests, self._step = now, same, None
        if self._seen < STEPS:
            return None
        plain = [(n, statistics.median(kept)) for n, kept in sorted(self._plain.items()) if len(kept) >= ENOUGH]
        if not plain:
            return None
        self._seen = 0
        return Residuals(plain, self._beyond(plain))

    def _keep(self, step: _Step, seconds: float) -> None:
        self._seen += 1
        self._kept += 1
        beyond = seconds - step.expected
        if step.rows > step.requests:
            self._drafting.setdefault(step.rows, deque(maxlen=_KEPT)).append(
                _Drafted(self._kept, step.requests, beyond)
            )
            return
        self._plain.setdefault(step.requests, deque(maxlen=_KEPT)).append(beyond)
        size = self._size(step.requests)
        size.plain += 1
        if size.plain >= ENOUGH:
            size.known()

    def _beyond(self, plain: list[tuple[int, float]]) -> list[tuple[int, float]]:
        requests, seconds = zip(*plain, strict=True)
        since = self._kept - FORGOTTEN
        lately = ((rows, [step for step in kept if step.at > since]) for rows, kept in sorted(self._drafting.items()))
        return [
            (rows, statistics.median(s.beyond - float(np.interp(s.requests, requests, seconds)) for s in steps))
            for rows, steps in lately
            if len(steps) >= ENOUGH
        ]

    def _size(self, requests: int) -> _Size:
        return self._sizes.setdefault(requests.bit_length(), _Size())

    def leaves_out(self, requests: int) -> bool:
        """Whether this step should not draft, to see what one without drafts takes; asked once a step.

        It follows from counts alone, so that all ranks leave out the same.
        """
        size = self._size(requests)
        size.drafting += 1
        if size.drafting > size.due + _LONGEST:
            size.known()
        return size.drafting > size.due

    def end(self, requests: int, rows: int, expected: float, drafted: bool) -> None:
        """A step that only decoded ends.

        Args:
            requests: of the batch.
            rows: of its target pass.
            expected: seconds of its modelled parts, as they were measured at start.
            drafted: whether it drafted.

        """
        if rows > requests or not drafted:  # one that only drafts is neither plain nor whole
            self._step = _Step(requests, rows, expected)
