"""The command line: ``adaptivespec check``, ``demo``, ``bench``, ``compare``, ``eval``, ``simulate`` and more."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from adaptivespec_vllm.check.report import Report
from adaptivespec_vllm.runtime import missing_vllm

app = typer.Typer(
    help="Adaptive speculative decoding with EAGLE-3 draft trees for vLLM.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except ModuleNotFoundError as error:  # torch and more come with vLLM
        missing = missing_vllm()
        if missing is None:
            raise
        typer.echo(f"adaptivespec: {missing} (missing here: {error.name})", err=True)
        raise SystemExit(1) from None


@app.command()
def check(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[adaptivespec.json]", help="Configuration to look at; the default without."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Target, a directory or a hub id: run vLLM's whole start-up check too."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Start an engine once and measure what a step costs here; with --model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Say what this machine has and what a configuration means; exit status 1 if decoding would not start."""
    with _vllm_quiet():
        report = Report.gather(config, model, measure)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        report.show(Console(soft_wrap=True, highlight=False))
    raise typer.Exit(1 if report.errors else 0)


_PASSED_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}
"""Of a command whose options are its own module's, which is imported when it is asked for."""


@app.command(**_PASSED_ON)
def demo(context: typer.Context) -> None:
    """Decode real prompts on this machine's CPU and compare (``adaptivespec demo --help``)."""
    from adaptivespec_vllm.demo.cli import run

    _pass_on(context, "demo", run)


@app.command(**_PASSED_ON)
def bench(context: typer.Context) -> None:
    """Measure ways of decoding a model of yours, in turns (``adaptivespec bench --help``)."""
    from adaptivespec_vllm.bench.cli import run

    _pass_on(context, "bench", run)


@app.command(**_PASSED_ON)
def compare(context: typer.Context) -> None:
    """Hold two results of ``bench`` against each other (``adaptivespec compare --help``)."""
    from adaptivespec_vllm.bench.cli import run_compare

    _pass_on(context, "compare", run_compare)


@app.command("eval", **_PASSED_ON)
def evaluate(context: typer.Context) -> None:
    """Say what ways of decoding do to answers (``adaptivespec eval --help``)."""
    from adaptivespec_vllm.eval.cli import run

    _pass_on(context, "eval", run)


@app.command("report", **_PASSED_ON)
def report(context: typer.Context) -> None:
    """Put results of bench and eval on one page (``adaptivespec report --help``)."""
    from adaptivespec_vllm.report.cli import run

    _pass_on(context, "report", run)


@app.command("simulate", **_PASSED_ON)
def simulate(context: typer.Context) -> None:
    """Decode recorded texts under any costs of a step (``adaptivespec simulate --help``)."""
    from adaptivespec_vllm.simulate.cli import run

    _pass_on(context, "simulate", run)


@app.command("train-head", **_PASSED_ON)
def train_head(context: typer.Context) -> None:
    """Train an EAGLE-3 head for a target of yours (``adaptivespec train-head --help``)."""
    from adaptivespec_vllm.training.cli import run

    _pass_on(context, "train-head", run)


@app.command("serve-ray", **_PASSED_ON)
def serve_ray(context: typer.Context) -> None:
    """Serve models with Ray Serve's OpenAI application (``adaptivespec serve-ray --help``)."""
    from adaptivespec_vllm.ray_serve.cli import run

    _pass_on(context, "serve-ray", run)


@app.command("batch", **_PASSED_ON)
def batch(context: typer.Context) -> None:
    """Answer a file of requests (``adaptivespec batch --help``)."""
    from adaptivespec_vllm.batch.cli import run

    _pass_on(context, "batch", run, ignore_unknown_options=True, allow_extra_args=True)


def _pass_on(context: typer.Context, name: str, command: Callable[..., None], **settings: Any) -> None:
    own = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    own.command(context_settings=settings)(command)
    own(args=context.args, prog_name=f"adaptivespec {name}")


@contextlib.contextmanager
def _vllm_quiet() -> Iterator[None]:
    """Keep vLLM's log out of our output: errors only, and on standard error."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with contextlib.redirect_stdout(sys.stderr):
        yield


if __name__ == "__main__":
    main()
