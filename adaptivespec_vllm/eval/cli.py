"""The command `adaptivespec eval`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from adaptivespec_vllm import runtime
from adaptivespec_vllm.bench import arms as bench_arms
from adaptivespec_vllm.bench.errors import BadInput, failure_of
from adaptivespec_vllm.bench.inputs import DTYPES, MOST_BATCH, MOST_CONTEXT, check_integer, check_path, output_directory
from adaptivespec_vllm.eval.exercises import Exercises
from adaptivespec_vllm.eval.report import report
from adaptivespec_vllm.eval.session import Inputs, Session
from adaptivespec_vllm.eval.tasks import TASKS, Task
from adaptivespec_vllm.screen import quiet

LOG = "engines.log"
REPORT = "report.txt"
DEFAULT_ARMS = "plain tree:5,4,8 tree:5,4,8@0.2"
MOST_EXERCISES = 100_000
_REPORT_WIDTH = 160
_STOPPED = 130


def run(
    model: Annotated[str, typer.Option("--model", help="Target: a directory or a hub id.")],
    head: Annotated[
        str | None, typer.Option("--head", help="EAGLE-3 head of all arms that draft: a directory or a hub id.")
    ] = None,
    arms: Annotated[
        str, typer.Option("--arms", help=f"Names separated by spaces. {bench_arms.ARMS_HELP}")
    ] = DEFAULT_ARMS,
    gsm8k: Annotated[
        Path | None, typer.Option("--gsm8k", help='JSON lines with "question", "answer": the last number counts.')
    ] = None,
    humaneval: Annotated[
        Path | None,
        typer.Option("--humaneval", help='JSON lines with "prompt", "entry_point", "test": run in a sandbox.'),
    ] = None,
    math: Annotated[
        Path | None,
        typer.Option("--math", help='JSON lines with "problem", "answer" (LaTeX): compared by math-verify.'),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help='JSON lines with "prompt" (or "question", "instruction", "turns"): texts are compared.'
        ),
    ] = None,
    exercises: Annotated[
        int | None,
        typer.Option("--exercises", help="So many sums, copies, counts and formats, made from --seed: no file needed."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Questions of each file at most, spread evenly over it.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer at most.")] = 512,
    batch: Annotated[int, typer.Option("--batch", help="Questions decoded together.")] = 8,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    eager: Annotated[
        bool | None,
        typer.Option("--eager/--compiled", help="Without: eager on a CPU, compiled elsewhere.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="auto, float32, bfloat16, float16. Without: float32 on a CPU, else auto."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads of OpenMP. Without: OMP_NUM_THREADS, or one a core.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Directory for everything; without: eval-results/TIME. One of a run that was "
                     "stopped, with the same options: the run goes on."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of engines and of sampling.")] = 0,
) -> None:  # fmt: skip
    """Say what ways of decoding do to answers: accuracy on tasks, and how far texts are from those of plain decoding.

    Every arm answers the same questions, and each is compared with plain decoding question by question: how many are
    lost and gained (McNemar's test), which share of the accuracy is kept (with its interval), where texts part, how
    many tokens were not the target's first choice and what they gave up. Files of questions are yours: GSM8K,
    HumanEval and MATH-500 in their usual form, or any prompts; exercises for small models are made here. It warns
    where there are too few of them.

    Written to the output directory: answers.jsonl (as they come), eval.json, report.txt, the log of the engines.
    """
    try:
        if threads is not None and not 1 <= threads <= 1024:
            raise BadInput("--threads", threads, "an integer from 1 to 1024")
        chosen = _gather(
            Inputs(
                model=model,
                head=head,
                arms=bench_arms.parse(arms, head),
                tasks=_tasks(
                    {"gsm8k": gsm8k, "humaneval": humaneval, "math": math, "prompts": prompts}, exercises, seed
                ),
                limit=limit,
                batch=batch,
                tokens=max_tokens,
                temperature=temperature,
                dtype=dtype,
                eager=eager,
                seed=seed,
            )
        )
        runtime.enter(reexecute=True, threads=threads)
        directory = output_directory(output or Path("eval-results") / datetime.now().strftime("%Y%m%d-%H%M%S"))
    except BadInput as error:
        typer.echo(f"eval: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(_evaluate(chosen, directory))


def _tasks(files: dict[str, Path | None], exercises: int | None, seed: int) -> list[Task]:
    tasks: list[Task] = [task(path) for task in TASKS if (path := files[task.name]) is not None]
    if exercises is not None:
        check_integer("--exercises", exercises, 1, MOST_EXERCISES)
        tasks.append(Exercises(exercises, seed))
    if not tasks:
        named = ", ".join(f"--{task.name}" for task in TASKS)
        raise BadInput("eval", None, f"at least one file of questions, by {named}, or --exercises")
    return tasks


def _gather(inputs: Inputs) -> Inputs:
    """The options, or the first fault among them."""
    check_path("--model", inputs.model)
    check_path("--head", inputs.head)
    check_integer("--max-tokens", inputs.tokens, 1, MOST_CONTEXT)
    check_integer("--batch", inputs.batch, 1, MOST_BATCH)
    check_integer("--limit", inputs.limit, 1, None)
    check_integer("--seed", inputs.seed, 0, 2**31 - 1)
    if not 0 <= inputs.temperature <= 2:
        raise BadInput("--temperature", inputs.temperature, "a number from 0 to 2")
    if inputs.dtype is not None and inputs.dtype not in DTYPES:
        raise BadInput("--dtype", inputs.dtype, ", ".join(DTYPES))
    return inputs


def _evaluate(chosen: Inputs, directory: Path) -> int:
    """Run, show and write; returns the exit status."""
    failure, status, session = None, 0, None
    log = directory / LOG
    with quiet(log, descriptor=1) as console:
        try:
            session = Session.open(chosen, directory, console)
            session.run()
        except KeyboardInterrupt:
            failure, status = "stopped; the same options and --output go on", _STOPPED
        except Exception as error:
            failure, status = failure_of(error, log)
        if session is not None:
            _show(session, console)
    if failure is not None:
        typer.echo(f"eval: {failure}", err=True)
    return status


def _show(session: Session, console: Console) -> None:
    path = session.close()
    if not session.result.figures:
        return
    console.print()
    console.print(report(session.result))
    with (session.directory / REPORT).open("w", encoding="utf-8") as stream:
        Console(file=stream, width=_REPORT_WIDTH, highlight=False).print(report(session.result))
    written = f"written to {session.directory}: {session.answers.path.name}, {path.name}, {REPORT}"
    console.print(Text(written, style="dim"))
