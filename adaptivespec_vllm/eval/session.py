"""One run from its options to its result: engines started one after the other, every question asked once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from adaptivespec_vllm.bench import models
from adaptivespec_vllm.bench.arms import PLAIN, Arm
from adaptivespec_vllm.bench.engines import Engine, Server, check_memory
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.prompts import in_chat_format
from adaptivespec_vllm.bench.session import reading, target_config, tokenizer_of
from adaptivespec_vllm.eval.answers import Answer, Answers
from adaptivespec_vllm.eval.result import Figures, Result, figures, too_small
from adaptivespec_vllm.eval.tasks import Item, Task
from adaptivespec_vllm.provenance import provenance
from adaptivespec_vllm.screen import Steps

LEAST_LOSS = 1e-4
"""Nats from which a token counts as not the target's first choice: less is rounding."""


@dataclass(frozen=True)
class Inputs:
    """What is to be evaluated; all of it checked."""

    model: str
    head: str | None
    arms: list[Arm]
    tasks: list[Task]
    limit: int | None
    batch: int
    tokens: int
    temperature: float
    dtype: str | None
    eager: bool | None
    seed: int


@dataclass
class Session:
    """A run that goes on."""

    inputs: Inputs
    directory: Path
    console: Console
    result: Result
    answers: Answers
    engines: list[Engine] = field(default_factory=list)

    @classmethod
    def open(cls, inputs: Inputs, directory: Path, console: Console) -> Session:
        """Begin, or go on with the run of the directory.

        Raises:
            BadInput: it is that of other settings.

        """
        settings = {
            "model": models.fingerprint(inputs.model),
            "head": None if inputs.head is None else models.fingerprint(inputs.head),
            "arms": {arm.name: arm.speculative for arm in inputs.arms},
            "tasks": {task.name: {"sha256": task.digest, "limit": inputs.limit} for task in inputs.tasks},
            "max_tokens": inputs.tokens,
            "batch": inputs.batch,
            "temperature": inputs.temperature,
            "seed": inputs.seed,
            "dtype": inputs.dtype,
            "eager": inputs.eager,
        }
        answers = Answers(directory, settings)
        if answers.rows:
            console.print(f"  {len(answers.rows)} answers are there already", style="dim")
        return cls(inputs, directory, console, Result(provenance=provenance(), settings=settings), answers)

    def run(self) -> None:
        """Ask whatever has no answer yet."""
        missing = {
            arm.name: [(task, self._missing(arm, task)) for task in self.inputs.tasks] for arm in self.inputs.arms
        }
        if not any(items for tasks in missing.values() for _, items in tasks):
            self.result.complete = True
            return
        for task in self.inputs.tasks:
            task.prepare()
        steps = Steps(self.console)
        with steps.step("reading the tokenizer, importing vLLM"):
            with reading("--model", self.inputs.model, "a directory or hub id of a model with its tokenizer"):
                tokenizer, config = tokenizer_of(self.inputs.model), target_config(self.inputs.model)
            prompts = {
                (task.name, item.id): list(tokenizer.encode(task.message(item)))
                if task.completed
                else in_chat_format(tokenizer, task.message(item))
                for task in self.inputs.tasks
                for item in task.few(self.inputs.limit)
            }
            chats = bool(getattr(tokenizer, "chat_template", None))
            server = self._server(max(map(len, prompts.values())), config)
        total = len(prompts) * len(self.inputs.arms)
        with self._progress(total) as (tick, done):
            for arm in self.inputs.arms:
                if not any(items for _, items in missing[arm.name]):
                    continue
                tick(f"starting {arm.name}")
                engine = self._start(arm, server)
                for task, items in missing[arm.name]:
                    tick(f"{arm.name}, {task.name}")
                    for first in range(0, len(items), self.inputs.batch):
                        group = items[first : first + self.inputs.batch]
                        self._ask(engine, task, group, [prompts[task.name, item.id] for item in group], chats)
                        done(len(group))
        self.result.complete = True

    def close(self) -> Path:
        """Make figures of the answers, and write the result."""
        self.answers.close()
        self.result.figures = list(self._figures())
        self.result.warnings += too_small(self.result.figures)
        return self.result.write(self.directory)

    # --- asking ---

    def _missing(self, arm: Arm, task: Task) -> list[Item]:
        rows = self.answers.rows
        return [item for item in task.few(self.inputs.limit) if (arm.name, task.name, item.id) not in rows]

    def _server(self, longest: int, config: Any) -> Server:
        from adaptivespec_vllm.engine import seams

        given, device = self.inputs, seams.platform()
        length = models.room(longest, given.tokens)
        most = getattr(config, "max_position_embeddings", None)
        if most is not None and length > most:
            asked = f"prompts of up to {longest} tokens and answers of {given.tokens}"
            raise BadInput("--max-tokens", asked, f"{length} tokens, some to spare, must fit into the model's {most}")
        server = Server.sized(
            given.model,
            config,
            device=device,
            dtype=given.dtype,
            eager=given.eager,
            length=length,
            requests=given.batch,
            batched_tokens=given.batch * longest,
            seed=given.seed,
        )
        told = check_memory(given.model, given.head, config, server, len(given.arms))
        self.console.print(f"  {told}", style="dim")
        return server

    def _start(self, arm: Arm, server: Server) -> Engine:
        try:
            engine = Engine.start(arm, server, len(self.inputs.arms))
        except Exception as error:
            error.add_note(f"arm {arm.name!r} did not start")
            raise
        self.engines.append(engine)
        return engine

    def _ask(
        self, engine: Engine, task: Task, items: Sequence[Item], prompts: Sequence[Sequence[int]], chats: bool
    ) -> None:
        """Decode a batch, mark it, keep it."""
        from vllm import SamplingParams

        greedy = self.inputs.temperature == 0
        params = SamplingParams(
            temperature=self.inputs.temperature,
            max_tokens=self.inputs.tokens,
            seed=None if greedy else self.inputs.seed,
            logprobs=1,
            stop=list(task.stop) or None if task.completed or not chats else None,
        )
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        engine.counters()  # reading resets them
        started = time.perf_counter()
        outputs = engine.llm.generate(given, params, use_tqdm=False)
        seconds = (time.perf_counter() - started) / len(items)
        steps = engine.counters().get("steps")
        for item, output in zip(items, outputs, strict=True):
            (own,) = output.outputs
            mark = task.mark(item, own.text)
            self.answers.add(
                Answer(
                    arm=engine.arm.name,
                    task=task.name,
                    id=item.id,
                    text=own.text,
                    tokens=list(own.token_ids),
                    losses=list(_losses(own)) if greedy else None,
                    finish=own.finish_reason or "",
                    correct=mark.correct,
                    why=mark.why,
                    seconds=seconds,
                    # A prompt's own step brings the first token: it is none of drafting's.
                    steps=None if steps is None else steps / len(items) - 1,
                )
            )

    # --- what came of it ---

    def _figures(self) -> Iterator[Figures]:
        rows = self.answers.rows
        for task in self.inputs.tasks:
            for arm in self.inputs.arms:
                both = [
                    (answer, plain)
                    for item in task.few(self.inputs.limit)
                    if (answer := rows.get((arm.name, task.name, item.id)))
                    and (plain := rows.get((PLAIN, task.name, item.id)))
                ]
                if both:
                    answers, plains = (list(column) for column in zip(*both, strict=True))
                    yield figures(arm, task, answers, plains)

    @contextmanager
    def _progress(self, total: int) -> Iterator[tuple[Any, Any]]:
        """A bar on a terminal, lines elsewhere; the result is written now and then."""
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        console = self.console
        console.print(Text(f"Asking: {total} answers", style="bold"))
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=total, completed=len(self.answers.rows))

            def tick(what: str) -> None:
                progress.update(bar, description=f"{what:24}")
                if not console.is_terminal:
                    console.print(f"  {what}", style="dim")

            def done(count: int) -> None:
                progress.advance(bar, count)
                if not console.is_terminal:
                    console.print(f"  {len(self.answers.rows)} of {total}", style="dim")

            yield tick, done


def _losses(output: Any) -> Iterator[tuple[int, float]]:
    """Tokens that were not the target's first choice, and the nats that each gave up."""
    for place, (token, entries) in enumerate(zip(output.token_ids, output.logprobs or [], strict=True)):
        loss = max(entry.logprob for entry in entries.values()) - entries[token].logprob
        if loss > LEAST_LOSS:
            yield place, round(loss, 5)
