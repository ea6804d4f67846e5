"""The commands `adaptivespec bench` and `adaptivespec compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from adaptivespec_vllm import runtime
from adaptivespec_vllm.bench import inputs as given
from adaptivespec_vllm.bench import plots
from adaptivespec_vllm.bench.arms import ARMS_HELP, DEFAULT_ARMS
from adaptivespec_vllm.bench.compare import compare, shown
from adaptivespec_vllm.bench.errors import BadInput, failure_of
from adaptivespec_vllm.bench.report import report
from adaptivespec_vllm.bench.result import Result
from adaptivespec_vllm.bench.session import Session
from adaptivespec_vllm.screen import quiet

LOG = "engines.log"
REPORT = "report.txt"
_REPORT_WIDTH = 160
_PIPE_WIDTH = 110
_STOPPED = 130


def run(
    model: Annotated[str, typer.Option("--model", help="Target: a directory or a hub id.")],
    head: Annotated[
        str | None, typer.Option("--head", help="EAGLE-3 head of all arms that draft: a directory or a hub id.")
    ] = None,
    arms: Annotated[str, typer.Option("--arms", help=f"Names separated by spaces. {ARMS_HELP}")] = DEFAULT_ARMS,
    batch: Annotated[str, typer.Option("--batch", help="Requests decoded together, e.g. 1,2,4,8.")] = "1",
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            help="Lengths of prompts, e.g. 64,512,2048: a made-up log, another for each prompt, is put before the "
            "question until the prompt has about that many tokens. Without: prompts as they are.",
        ),
    ] = None,
    kinds: Annotated[str | None, typer.Option("--kinds", help="Only these kinds of prompts, e.g. math,code.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='JSON lines with "id", "kind", "prompt"; without: nine short ones.'),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer at most.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", help="Turns of every arm at each batch of prompts.")] = 3,
    limit: Annotated[int | None, typer.Option("--limit", help="Prompts of each kind at most.")] = None,
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
        Path | None, typer.Option("--output", help="Directory for everything; without: bench-results/TIME.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of engines, of sampling and of made-up context.")] = 0,
) -> None:
    """Compare ways of decoding on this machine, in turns.

    One engine an arm, all in this process with the same settings, and every arm decodes a batch of prompts before the
    next batch comes: whatever else the machine does falls on all of them alike. So all engines live at once, and
    weights are not shared: memory has to hold arms x (weights + keys and values), which is told before they start.
    The default set of arms is 15 engines; choose fewer with --arms for a large model.

    Written to the output directory: result.json (after every turn), report.txt, plots, and the log of the engines.
    """
    try:
        if threads is not None and not 1 <= threads <= 1024:
            raise BadInput("--threads", threads, "an integer from 1 to 1024")
        chosen = given.gather(
            model=model,
            head=head,
            arm_names=arms,
            batch=batch,
            context=context,
            kinds=kinds,
            file=prompts,
            limit=limit,
            tokens=max_tokens,
            repeats=repeats,
            temperature=temperature,
            dtype=dtype,
            eager=eager,
            seed=seed,
        )
        runtime.enter(reexecute=True, threads=threads)
        directory = given.output_directory(output)
    except BadInput as error:
        raise _exit("bench", str(error), 2) from None
    raise typer.Exit(_measure(chosen, directory))


def _measure(chosen: given.Inputs, directory: Path) -> int:
    """Run, show and write; returns the exit status."""
    failure, status = None, 0
    log = directory / LOG
    with quiet(log, descriptor=1) as console:
        if not plots.available():
            console.print(Text(plots.MISSING, style="yellow"))  # its brackets are no markup
        session = Session.open(chosen, directory, console)
        try:
            session.run()
        except KeyboardInterrupt:
            failure, status = "stopped", _STOPPED
        except Exception as error:
            failure, status = failure_of(error, log)
        if session.result.samples:
            _show(session, console)
    if failure is not None:
        typer.echo(f"bench: {failure}", err=True)
    return status


def _show(session: Session, console: Console) -> None:
    path = session.close()
    console.print()
    console.print(report(session.result))
    written = [path, session.directory / REPORT]
    with written[1].open("w", encoding="utf-8") as stream:
        Console(file=stream, width=_REPORT_WIDTH, highlight=False).print(report(session.result))
    if plots.available():
        written += plots.draw(session.result, session.directory)
    names = ", ".join(file.name for file in written)
    console.print(Text(f"written to {session.directory}: {names}", style="dim"))


def run_compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="result.json of adaptivespec bench, or its directory.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The result that is held against it.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Say what changed from one result of `adaptivespec bench` to another, and what else was not alike."""
    try:
        comparison = compare(Result.read(before), Result.read(after), (str(before), str(after)))
    except BadInput as error:
        raise _exit("compare", str(error), 2) from None
    if as_json:
        typer.echo(comparison.model_dump_json(indent=1))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:  # a file or a pipe has no width of its own
            console.width = _PIPE_WIDTH
        console.print(shown(comparison))


def _exit(command: str, message: str, status: int) -> typer.Exit:
    typer.echo(f"{command}: {message}", err=True)
    return typer.Exit(status)
