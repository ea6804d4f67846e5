"""Rows answered by engines in actors of Ray Data, which feeds them, and starts those again that die.

Rows travel as JSON text: Ray Data's tables would give every row the keys of all others, as nulls.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.data import ActorPoolStrategy, DataContext

from adaptivespec_vllm.batch.engine import AnsweringEngine
from adaptivespec_vllm.batch.rows import Row

_TASKS = 4
"""Of an actor at once, so that its engine has rows of the next while the last of one are long."""

_RESTARTS = 5
"""Of an actor, and of a task: a row that ends every engine it meets would go on for ever."""


@dataclass(frozen=True)
class Pool:
    """The actors.

    Attributes:
        engines: how many, each with a copy of the model.
        cpus: of the cluster, taken by each.
        gpus: taken by each.
        rows: of a task: what is done again when an actor dies in it.

    """

    engines: int
    cpus: float
    gpus: float
    rows: int


class Actor:
    """The class that Ray Data starts in each actor."""

    def __init__(self, arguments: Namespace) -> None:
        self._engine = AnsweringEngine(arguments)

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Answer one row; Ray Data has several run at once."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            answer = await self._engine.answer(Row(**json.loads(row["row"])))
        except EngineDeadError:
            # An actor without its engine answers nothing more; Ray starts one that ends like this again, and its task.
            os._exit(1)
        return {"line": row["line"], "answer": json.dumps(answer)}


def answer_all(
    rows: Sequence[Row], arguments: Namespace, pool: Pool, keep: Callable[[int, dict[str, Any]], None]
) -> None:
    """Answer every row; ``keep`` is told the line and the answer when a task is done. Ray is connected."""
    for line, answer in _answers(rows, arguments, pool):
        keep(line, answer)


def _answers(rows: Sequence[Row], arguments: Namespace, pool: Pool) -> Iterator[tuple[int, dict[str, Any]]]:
    context = DataContext.get_current()
    context.execution_options.preserve_order = False
    context.enable_progress_bars = False
    items = [{"line": row.line, "row": json.dumps(asdict(row))} for row in rows]
    tasks = -(-len(items) // pool.rows)
    answered = ray.data.from_items(items, override_num_blocks=tasks).map(
        Actor,
        fn_constructor_args=(arguments,),
        compute=ActorPoolStrategy(size=pool.engines, max_tasks_in_flight_per_actor=_TASKS),
        num_cpus=pool.cpus,
        num_gpus=pool.gpus,
        max_concurrency=_TASKS,
        max_restarts=_RESTARTS,
        max_task_retries=_RESTARTS,
    )
    for row in answered.iter_rows():
        yield row["line"], json.loads(row["answer"])
