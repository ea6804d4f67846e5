"""The command ``adaptivespec batch``."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from adaptivespec_vllm.config import ConfigError, reason

_STOPPED = 130
_PASSES = 3
"""Times that rows without an answer are asked again, should Ray give back fewer than it was given."""
_INTERVAL = 10.0
"""Seconds between two lines of progress."""


def run(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="in.jsonl", help="Requests, one a line.")],
    output: Annotated[Path, typer.Argument(metavar="out.jsonl", help="Answers; must not exist.")],
    on_ray: Annotated[
        bool | None,
        typer.Option("--ray/--no-ray", help="Engines in actors of Ray Data, or one in this process. Without: Ray, "
                     "where it is installed.", show_default=False),
    ] = None,
    engines: Annotated[int, typer.Option("--engines", min=1, help="With Ray: copies of the model.")] = 1,
    address: Annotated[
        str | None, typer.Option("--address", help='With Ray: "auto" or a cluster; without, a local one is started.')
    ] = None,
    cpus: Annotated[float, typer.Option("--cpus", min=0, help="With Ray: CPUs that an engine takes.")] = 1.0,
    gpus: Annotated[
        float | None,
        typer.Option("--gpus", min=0, help="With Ray: GPUs that an engine takes. Without: its ranks, or 0 on CPUs.",
                     show_default=False),
    ] = None,
    rows_per_task: Annotated[
        int, typer.Option("--rows-per-task", min=1, help="With Ray: rows that are done again when an engine dies.")
    ] = 16,
    restart: Annotated[bool, typer.Option("--restart", help="Forget what an earlier run has answered.")] = False,
) -> None:  # fmt: skip
    """Answer a file of requests; every further option is vLLM's own, as --model and --speculative-config.

    A row is a line of OpenAI's batch format, or a request by itself: {"prompt": ...} or {"messages": [...]}, with any
    parameters of vLLM's server beside them. Answers are kept in out.jsonl.partial as they come: the same command goes
    on where a run was stopped. out.jsonl has them all, in the order of the input. Exit status 1: some were refused.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = _run(source, output, context.args, _Ray(on_ray, engines, address, cpus, gpus, rows_per_task), restart)
    except ConfigError as error:
        typer.echo(f"batch: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("batch: stopped; the same command goes on", err=True)
        raise typer.Exit(_STOPPED) from None
    raise typer.Exit(status)


class _Ray:
    """The options that are Ray's."""

    def __init__(
        self, wanted: bool | None, engines: int, address: str | None, cpus: float, gpus: float | None, rows: int
    ) -> None:
        there = importlib.util.find_spec("ray") is not None
        if wanted and not there:
            raise ConfigError("--ray: Ray is not installed; install adaptivespec-vllm[ray], or leave the option out")
        self.used = there if wanted is None else wanted
        if not self.used and (engines > 1 or address is not None):
            raise ConfigError("--engines, --address: they need Ray; allowed: without --no-ray, where Ray is installed")
        self.engines, self.address, self.cpus, self.gpus, self.rows = engines, address, cpus, gpus, rows


def _run(source: Path, output: Path, vllm_options: list[str], on_ray: _Ray, restart: bool) -> int:
    if output.exists():
        raise ConfigError(f"{output}: exists; allowed: a name that is free")
    _environment()
    from adaptivespec_vllm.batch import engine, rows
    from adaptivespec_vllm.batch.journal import SUFFIX, Journal

    arguments = engine.parse(vllm_options)
    asked = rows.read(source, engine.model_name(arguments))
    if restart:
        output.with_name(output.name + SUFFIX).unlink(missing_ok=True)
    facts = {
        "rows": [[row.line, row.custom_id, row.url, row.body] for row in asked],
        "options": vllm_options,
        "speculative_config": arguments.speculative_config,  # what a file held
    }
    with Journal(output, facts, {row.line for row in asked}) as journal:
        progress = _Progress(len(asked), len(journal.done))

        def keep(line: int, answer: dict[str, Any]) -> None:
            if journal.add(line, answer):
                progress.advance()

        try:
            _answer(lambda: [row for row in asked if row.line not in journal.done], arguments, on_ray, keep)
        except (ConfigError, KeyboardInterrupt):
            raise
        except Exception as error:  # whatever an engine, vLLM or Ray ends with
            typer.echo(f"batch: {reason(error)}; {len(journal.done)} of {len(asked)} rows are answered, the same "
                       "command goes on", err=True)  # fmt: skip
            return 1
        counts = journal.finish()
    typer.echo(f"{output}: {counts['answered']} answered, {counts['refused']} refused")
    return 1 if counts["refused"] else 0


def _answer(
    left: Callable[[], list[Any]], arguments: Namespace, on_ray: _Ray, keep: Callable[[int, dict[str, Any]], None]
) -> None:
    """Have every row answered that is left."""
    if not left():
        return
    if not on_ray.used:
        from adaptivespec_vllm.batch import local

        local.answer_all(left(), arguments, keep)
        return
    from adaptivespec_vllm.batch import on_ray as runner
    from adaptivespec_vllm.ray_serve.cluster import cluster
    from adaptivespec_vllm.ray_serve.schema import RayConfig

    gpus = _gpus(arguments) if on_ray.gpus is None else on_ray.gpus
    pool = runner.Pool(on_ray.engines, on_ray.cpus, gpus, on_ray.rows)
    # Ray Data wants a CPU of its own beside those of the engines
    cpus = int(on_ray.engines * on_ray.cpus) + 1
    local_cluster = RayConfig(num_cpus=cpus, object_store_memory=200_000_000)
    with cluster(RayConfig(address=on_ray.address) if on_ray.address else local_cluster):
        for _ in range(_PASSES):
            runner.answer_all(left(), arguments, pool, keep)
            if not left():
                return
    raise RuntimeError(f"{len(left())} rows came back from Ray without an answer")


def _gpus(arguments: Namespace) -> float:
    from vllm.platforms import current_platform

    return 0.0 if current_platform.is_cpu() else float(arguments.tensor_parallel_size)


def _environment() -> None:
    """What an engine in this process, or in processes that it starts, wants; before torch or vLLM is imported."""
    from adaptivespec_vllm import runtime

    os.environ.update(runtime.completed(os.environ, VLLM_LOGGING_LEVEL="WARNING"))


class _Progress:
    """A line now and then, and one at the end."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done = total, done
        self._first: tuple[float, int] | None = None
        self._said = 0.0
        if done:
            typer.echo(f"{done} of {total} rows are answered already", err=True)

    def advance(self) -> None:
        """One row more is answered."""
        self._done += 1
        now = time.monotonic()
        started, before = self._first = self._first or (now, self._done)  # engines had to start before that
        if self._done == self._total or now - self._said >= _INTERVAL:
            self._said = now
            rate = f", {(self._done - before) / (now - started):.2f} a second" if self._done > before else ""
            typer.echo(f"{self._done} of {self._total} rows{rate}", err=True)
