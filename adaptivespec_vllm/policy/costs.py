"""What a step costs on this machine: seconds by rows, for the target and for the head.

A row is one position of a forward pass: a root or a draft node in the target's pass, a node in a level of the head.
Only ratios of seconds decide anything, so any unit does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np

from adaptivespec_vllm.config import ConfigError, key_error, read, shown

_FAR = float(1 << 24)
"""Rows that no step reaches; where the last slope ends."""


_LEAST = 1e-9
"""Seconds of anything, at least."""


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # (mean, how many)
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, weight = pools.pop()
            mean = (before * weight + mean * count) / (weight + count)
            count += weight
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


class CostTable:
    """Seconds by rows: linear between measured points, their first value below, the last slope beyond.

    Measured times scatter, but more rows never cost less: the points are made non-decreasing by the least change
    (isotonic regression).

    Args:
        points: (rows, seconds) with ascending rows; at least one.

    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        rows, seconds = zip(*points, strict=True)
        self.points = tuple(zip(rows, isotonic(seconds), strict=True))
        slope = (self.points[-1][1] - self.points[-2][1]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
        self._rows = np.array([*rows, rows[-1] + _FAR])
        self._seconds = np.array([*(s for _, s in self.points), self.points[-1][1] + slope * _FAR])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CostTable) and self.points == other.points

    def __hash__(self) -> int:
        return hash(self.points)

    def __repr__(self) -> str:
        return f"CostTable({list(self.points)})"

    @overload
    def __call__(self, rows: float) -> float: ...
    @overload
    def __call__(self, rows: np.ndarray) -> np.ndarray: ...
    def __call__(self, rows: float | np.ndarray) -> float | np.ndarray:
        """Seconds of that many rows; of an array element by element."""
        seconds = np.interp(rows, self._rows, self._seconds)
        return seconds if isinstance(rows, np.ndarray) else float(seconds)


NOTHING = CostTable([(1, 0.0)])

Residuals = Sequence[tuple[int, float]]
"""(rows of the target's pass, seconds), rows ascending."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the parts of a step.

    Attributes:
        target: of the target's forward pass by rows, its logits included.
        first: of the head's first pass by rows, its logits and their best tokens included.
        level: of one level of the head by rows, with logits, best tokens and bookkeeping.
        overhead: of a step besides, whatever is drafted.
        requests: of a step besides, by requests.
        verifying: of a step that verifies drafts besides, by rows of the target's pass.

    """

    target: CostTable
    first: CostTable
    level: CostTable
    overhead: float = 0.0
    requests: CostTable = NOTHING
    verifying: CostTable = NOTHING

    def of_requests(self, requests: int) -> CostTable:
        """Seconds of a step of so many requests, without the head: by rows, their roots and any number of drafts."""
        return _of_requests(self.target, self.overhead + self.requests(requests), self.verifying, requests)

    def corrected(self, plain: Residuals, drafting: Residuals) -> Costs:
        """These costs, with what steps took beyond target and head.

        Numbers between those that were seen are interpolated, others are as the nearest.

        Args:
            plain: of steps without drafts, by requests; at least one.
            drafting: of steps that verified drafts, by rows, beyond those of plain steps of as many requests.

        """
        overhead = max(0.0, plain[0][1])
        return replace(
            self,
            overhead=overhead,
            requests=_levelled(((requests, seconds - overhead) for requests, seconds in plain)),
            verifying=_levelled(drafting) if drafting else NOTHING,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON and for :meth:`from_dict`."""
        tables = {name: [list(point) for point in getattr(self, name).points] for name in (*_TABLES, *_LEARNT)}
        return tables | {"overhead": self.overhead}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Costs:
        """Costs from plain values: ``{"target": [[1, 0.02], [8, 0.03]], "first": ..., "level": ..., "overhead": 0}``.

        Raises:
            ConfigError: names the key, what was given and what is allowed.

        """
        for key in values:
            if key not in (*_TABLES, "overhead", *_LEARNT):
                raise key_error(key, (*_TABLES, "overhead", *_LEARNT))
        overhead = values.get("overhead", 0.0)
        if not _is_number(overhead) or overhead < 0:
            raise ConfigError(f"overhead: got {shown(overhead)}; allowed: a number of at least 0 (seconds)")
        tables = {name: _table(name, values) for name in _TABLES}
        learnt = {name: _table(name, values, least=0.0) for name in _LEARNT if name in values}
        return Costs(**tables, **learnt, overhead=float(overhead))

    @staticmethod
    def read(path: str | Path) -> Costs:
        """Costs from a JSON file.

        Raises:
            ConfigError: for whatever is wrong with it; names the file.

        """
        values = read(Path(path))
        try:
            return Costs.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


_TABLES = ("target", "first", "level")
_LEARNT = ("requests", "verifying")


@lru_cache(maxsize=512)
def _of_requests(target: CostTable, besides: float, verifying: CostTable, requests: int) -> CostTable:
    more = sorted({requests + 1, requests + 2, *(r for r, _ in (*target.points, *verifying.points) if r > requests)})
    verified = ((rows, target(rows) + besides + verifying(rows)) for rows in more)
    return CostTable([(requests, target(requests) + besides), *verified])


def _levelled(points: Iterable[tuple[int, float]]) -> CostTable:
    """None of it below 0, and beyond the last point as there."""
    known = [(rows, max(0.0, seconds)) for rows, seconds in points]
    return CostTable([*known, (known[-1][0] + 1, known[-1][1])])


def _table(name: str, values: Mapping[str, Any], least: float = _LEAST) -> CostTable:
    bound = "above 0" if least > 0 else "of at least 0"
    allowed = f"a list of [rows, seconds], rows ascending from 1, seconds {bound}"
    if name not in values:
        raise ConfigError(f"{name}: missing; allowed: {allowed}")
    points = values[name]
    if not isinstance(points, Sequence) or isinstance(points, str) or not points:
        raise ConfigError(f"{name}: got {shown(points)}; allowed: {allowed}")
    last = 0
    for index, point in enumerate(points):
        if not (
            isinstance(point, Sequence)
            and len(point) == 2
            and _is_number(point[0])
            and point[0] >= 1
            and point[0] > last
            and _is_number(point[1])
            and (point[1] > 0 or point[1] == least)
        ):
            raise ConfigError(f"{name}[{index}]: got {shown(point)}; allowed: {allowed}")
        last = point[0]
    return CostTable((rows, float(seconds)) for rows, seconds in points)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e9


UNMEASURED = Costs(
    target=CostTable([(1, 1.0), (64, 2.0)]),
    first=CostTable([(1, 0.1), (64, 0.2)]),
    level=CostTable([(1, 0.08), (64, 0.16)]),
)
"""Stands in until costs are measured: a target that waits for memory, and a head of a tenth of its size."""
