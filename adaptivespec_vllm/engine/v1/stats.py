"""What a worker counts: of one engine step, and summed up.

A step's counts go to the front end with its tokens (:mod:`adaptivespec_vllm.engine.metrics`); their sums are read and
reset through ``collective_rpc("adaptivespec_stats")``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from adaptivespec_vllm.types import DraftTree

CHAIN_REASONS = ("no_tree", "moved_root", "other_tokens")
"""Why drafts are a chain: their list came back from the scheduler as no tree that was drafted."""


@dataclass(slots=True)
class WorkerStats:
    """Counts and sums; a *step* is one request's share of an engine step in which it emitted tokens."""

    engine_steps: int = 0
    plain_engine_steps: int = 0
    """Those in which no draft node was verified."""
    steps: int = 0
    emitted: int = 0
    accepted: int = 0
    drafted_nodes: int = 0
    drafted_depth: int = 0
    drafted_width: int = 0
    promotions: int = 0
    regret: float = 0.0
    """Log-probability (nats) that promotions gave up."""
    breaker_trips: int = 0
    guard_trips: Counter[str] = field(default_factory=Counter)
    """Times that a guard began to keep a request from promotions, by the guard."""
    accepted_at_depth: Counter[int] = field(default_factory=Counter)
    """Steps whose accepted path reached each depth."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Steps by emitted tokens."""
    nodes: Counter[int] = field(default_factory=Counter)
    """Steps by nodes of their tree; this and the next two only of steps that had one."""
    depths: Counter[int] = field(default_factory=Counter)
    widths: Counter[int] = field(default_factory=Counter)
    chains: Counter[str] = field(default_factory=Counter)
    """Trees that became chains, by reason."""
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

    def record(self, tree: DraftTree, accepted: int, promotions: int, regret: float) -> int:
        """Count a request's step; the depth of its tree."""
        self.steps += 1
        self.emitted += accepted + 1
        self.accepted += accepted
        self.promotions += promotions
        self.regret += regret
        self.lengths[accepted + 1] += 1
        if not len(tree):
            return 0
        self.accepted_at_depth.update(range(1, accepted + 1))
        levels = Counter(tree.depths())
        depth, width = max(levels), max(levels.values())
        self.drafted_nodes += len(tree)
        self.drafted_depth += depth
        self.drafted_width += width
        self.nodes[len(tree)] += 1
        self.depths[depth] += 1
        self.widths[width] += 1
        return depth

    def add(self, other: WorkerStats) -> None:
        """Sum up."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, f.name, mine + theirs)

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, fit to leave the worker process."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(v) if isinstance(v, Counter) else v for name, v in values.items()}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> WorkerStats:
        """What :meth:`as_dict` gave."""
        return cls(**{name: Counter(v) if isinstance(v, Mapping) else v for name, v in values.items()})
