"""Counters of a worker, read and reset through ``collective_rpc("adaptivespec_stats")``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class WorkerStats:
    """Sums since the last reset; a *step* is one request's share of an engine step in which it emitted tokens."""

    engine_steps: int = 0
    steps: int = 0
    emitted: int = 0
    accepted: int = 0
    drafted_nodes: int = 0
    drafted_depth: int = 0
    drafted_width: int = 0
    promotions: int = 0
    regret: float = 0.0
    accepted_at_depth: Counter[int] = field(default_factory=Counter)
    """Steps whose accepted path reached each depth."""
    chains: Counter[str] = field(default_factory=Counter)
    """Lists of draft tokens that were taken as chains, by reason."""
    seconds: Counter[str] = field(default_factory=Counter)
    """Wall-clock by section; sections nest as their names do (``target/attention`` is part of ``target``)."""

    @contextmanager
    def timed(self, section: str) -> Iterator[None]:
        """Add the time of a block to a section."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[section] += time.perf_counter() - started

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, fit to leave the worker process."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(v) if isinstance(v, Counter) else v for name, v in values.items()}
