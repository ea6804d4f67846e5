"""Where the time of a stock step goes: a stopwatch held to the parts that ours times itself."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Stopwatch:
    """Wall-clock of the target's forward pass and of the drafter of an engine in this process.

    Parts that a version of vLLM does not have under these names are missing from :meth:`read`, and count as rest.
    """

    def __init__(self, llm: Any) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        llm.collective_rpc(self._install)

    def read(self) -> dict[str, float]:
        """Seconds by section since the last call."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def _install(self, worker: Any) -> None:
        runner = worker.model_runner
        self._hold(runner, "_model_forward", "execute/target")
        self._hold(getattr(runner, "drafter", None), "propose", "draft/chain")

    def _hold(self, owner: Any, name: str, section: str) -> None:
        original: Callable[..., Any] | None = getattr(owner, name, None)
        if original is None:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._seconds[section] += time.perf_counter() - started

        setattr(owner, name, timed)
