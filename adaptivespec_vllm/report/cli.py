"""The command `adaptivespec report`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.inputs import output_directory
from adaptivespec_vllm.report import inputs

OUTPUT = Path("report")


def run(
    results: Annotated[
        list[Path],
        typer.Argument(help="result.json of bench and eval.json of eval, or the directories that hold them."),
    ],
    output: Annotated[Path, typer.Option("--output", help="Directory for the page and its pictures.")] = OUTPUT,
) -> None:
    """Put results of `adaptivespec bench` and `adaptivespec eval` on one page that stands alone.

    Speed against quality, accuracy, how far drafts are accepted, throughput by batch size, where the time goes, and
    one text with its trees and promoted tokens. All results must come from one machine and one target.

    Written to the output directory: report.html, with every picture inside it, and the pictures as PNG.
    """
    try:
        for library in ("matplotlib", "jinja2"):
            if importlib.util.find_spec(library) is None:
                raise BadInput(
                    "report", f"no {library}", "an environment with it: pip install 'adaptivespec-vllm[report]'"
                )
        found = inputs.read(results)
        directory = output_directory(output)
    except BadInput as error:
        typer.echo(f"report: {error}", err=True)
        raise typer.Exit(2) from None
    from adaptivespec_vllm.report import page

    paths = page.write(found, directory)
    typer.echo(f"{paths[0]} ({len(paths) - 1} pictures)")
