"""Rows answered by one engine of this process."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from adaptivespec_vllm.batch.engine import AnsweringEngine
from adaptivespec_vllm.batch.rows import Row

_AHEAD = 2
"""Requests in the engine for each that it decodes, so that none of its slots waits for us."""


def answer_all(rows: Iterable[Row], arguments: Namespace, keep: Callable[[int, dict[str, Any]], None]) -> None:
    """Answer every row; ``keep`` is told the line and the answer as soon as there is one.

    Raises:
        EngineDeadError: the engine has ended; what was kept stays.

    """
    asyncio.run(_answer_all(iter(rows), AnsweringEngine(arguments), keep))


async def _answer_all(
    rows: Iterator[Row], engine: AnsweringEngine, keep: Callable[[int, dict[str, Any]], None]
) -> None:
    async def one(row: Row) -> tuple[int, dict[str, Any]]:
        return row.line, await engine.answer(row)

    try:
        await engine.start()
        running: set[asyncio.Task[tuple[int, dict[str, Any]]]] = set()
        while True:
            running |= {asyncio.create_task(one(row)) for row in islice(rows, _AHEAD * engine.slots - len(running))}
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                keep(*task.result())
    finally:
        await engine.close()
