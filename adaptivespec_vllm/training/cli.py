"""`adaptivespec train-head`: an EAGLE-3 head for a target, from prompts alone."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from adaptivespec_vllm import runtime
from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.screen import quiet, tail
from adaptivespec_vllm.training import recipe as recipes
from adaptivespec_vllm.training.answers import Sampling
from adaptivespec_vllm.training.curve import CURVE, draw, picture_available, read_curve, table

LINE_EVERY = 30.0
"""Seconds between lines where the output is no terminal."""

DRAFT_VOCABULARY = 4096


def run(
    output: Annotated[Path, typer.Argument(help="Working directory; a run that was stopped goes on from it.")],
    model: Annotated[str, typer.Option("--model", help="Target: a directory or a hub id (Llama-like).")],
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompts", help="JSON lines with 'prompt' or 'messages' ('id' and 'kind' too); repeatable."),
    ] = None,
    own_prompts: Annotated[
        int, typer.Option("--own-prompts", min=0, help="So many prompts that the target writes itself, beside them.")
    ] = 0,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="One answer to each prompt at each of these; 0 is greedy.")
    ] = "0,0.7",
    max_answer: Annotated[int, typer.Option("--max-answer", min=8, help="Longest answer, in tokens.")] = 512,
    max_length: Annotated[
        int, typer.Option("--max-length", min=16, help="Longest prompt and answer together, in tokens.")
    ] = 1024,
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            "--draft-vocabulary",
            min=16,
            help="Tokens that the head can propose.",
            show_default=f"{DRAFT_VOCABULARY}, or that of --start-from",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the answers.")] = 8,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=64, help="Tokens of a training batch.")] = 4096,
    learning_rate: Annotated[float, typer.Option("--learning-rate", min=1e-6, max=1.0, help="Peak rate.")] = 1e-3,
    unrolled: Annotated[int, typer.Option("--unrolled", min=1, max=16, help="Draft steps that are trained.")] = 5,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the target while it answers: bfloat16, float16 or float32.")
    ] = "bfloat16",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of draws and orders.")] = 0,
    start_from: Annotated[
        Path | None,
        typer.Option("--start-from", help="Go on from this head (EAGLE layout): its weights, its draft vocabulary."),
    ] = None,
    until: Annotated[
        str, typer.Option("--until", help="Stop after this stage: answers, or head (all of it).")
    ] = "head",
) -> None:
    """Train an EAGLE-3 head on a target's own answers; the result is OUTPUT/head."""
    runtime.enter(reexecute=True)
    failure: str | None = None
    log = output / "train.log"
    try:
        if start_from is not None and draft_vocabulary is not None:
            raise ConfigError(
                f"--draft-vocabulary: got {draft_vocabulary}, but a head given with --start-from has its own; "
                "allowed: one of the two"
            )
        asked = recipes.Recipe(
            model=model,
            prompts=tuple(prompts or ()),
            own_prompts=own_prompts,
            sampling=Sampling(_temperatures(temperatures), max_answer, seed),
            draft_vocabulary=draft_vocabulary or DRAFT_VOCABULARY,
            schedule={
                "epochs": epochs,
                "batch_tokens": batch_tokens,
                "learning_rate": learning_rate,
                "unrolled": unrolled,
                "seed": seed,
            },
            dtype=_one_of("--dtype", dtype, ("bfloat16", "float16", "float32")),
            max_length=max_length,
            start_from=None if start_from is None else str(start_from.resolve()),
        )
        _one_of("--until", until, ("answers", "head"))
        asked.save(output)
        with quiet(log, descriptor=1) as console:
            _stages(asked, output, until, console)
    except (ConfigError, OSError) as error:
        failure = str(error)
    except KeyboardInterrupt:
        failure = "stopped; the same command goes on from here"
    except Exception as error:  # vLLM and transformers raise anything; the user gets the cause and the log
        log.open("a").write(traceback.format_exc())
        failure = f"{type(error).__name__}: {error}\n\nlast lines of {log}:\n{tail(log)}"
    if failure is not None:
        typer.echo(f"train-head: {failure}", err=True)
        raise SystemExit(1)


def _stages(asked: recipes.Recipe, output: Path, until: str, console: Console) -> None:
    screen = _Screen(console)
    recipes.check(asked)
    with screen.bars:
        recipes.answer(asked, output, screen.report)
        if until == "answers":
            return
        recipes.train(asked, output, screen.report)
    lines = read_curve(output / CURVE)
    console.print(table(lines))
    if picture_available():
        draw(lines, output / "curve.png")
    console.print(f"head: {output / 'head'} (in the layout of speculators: {output / 'head-speculators'})")


class _Screen:
    """A bar a stage on a terminal, a line every half minute elsewhere."""

    def __init__(self, console: Console) -> None:
        self.bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._spoke: dict[str, float] = {}

    def report(self, stage: str, done: float, total: float, note: str) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self.bars.add_task(stage, total=total, note=note)
        self.bars.update(self._tasks[stage], completed=done, total=total, note=note)
        now = time.monotonic()
        if not self._console.is_terminal and (done == total or now - self._spoke.get(stage, 0.0) >= LINE_EVERY):
            self._spoke[stage] = now
            self._console.print(f"{stage} {done:.0f}/{total:.0f} {note}")


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= v <= 2 for v in values) or len(set(values)) != len(values):
        raise ConfigError(f"--temperatures: got {text!r}; allowed: different numbers from 0 to 2, with commas between")
    return values


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{option}: got {value!r}; allowed: {', '.join(allowed)}")
    return value
