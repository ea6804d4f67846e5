"""The command `adaptivespec simulate`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from adaptivespec_vllm.bench import arms as named
from adaptivespec_vllm.bench import plots as bench_plots
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.inputs import integers, output_directory, words
from adaptivespec_vllm.simulate import plots
from adaptivespec_vllm.simulate.figures import Choice, choices, policy_maker, simulate, swept
from adaptivespec_vllm.simulate.recording import Recording
from adaptivespec_vllm.simulate.report import report
from adaptivespec_vllm.simulate.search import Search
from adaptivespec_vllm.simulate.tables import SHIPPED, costs_of, with_head, with_rows

DEFAULT_RECORDING = Path(__file__).parent / "recordings" / "smollm2-135m.npz"
DEFAULT_COSTS = "a100-8b"
DEFAULT_ARMS = "plain stock:1-5 tree:3,4,3 tree:5,4,8 tree:8,4,24 paper adaptive default default:10,6,60"
MOST_BATCH = 256
_SWEEPS = {"rows of the target's pass": with_rows, "passes of the head": with_head}
_PIPE_WIDTH = 150


def run(
    costs: Annotated[
        str,
        typer.Option(
            "--costs",
            help=f"What a step costs: {', '.join(SHIPPED)}, or a file in the format of tree.costs.",
        ),
    ] = DEFAULT_COSTS,
    recording: Annotated[
        Path, typer.Option("--recording", help="What scripts/record_steps.py wrote.", show_default=False)
    ] = DEFAULT_RECORDING,
    arms: Annotated[str, typer.Option("--arms", help=f"Names separated by spaces. {named.ARMS_HELP}")] = DEFAULT_ARMS,
    kinds: Annotated[str | None, typer.Option("--kinds", help="Only these kinds of texts, e.g. math,code.")] = None,
    batch: Annotated[str, typer.Option("--batch", help="Requests decoded together, e.g. 1,8,32.")] = "1",
    search: Annotated[
        bool, typer.Option("--search", help="Try every static shape, and hold the arms against the best.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plots",
            help="Directory for a picture of the choice of the last cost-aware arm, as rows and the head get dearer.",
        ),
    ] = None,
) -> None:
    """Decode recorded texts in virtual time, under any costs of a step.

    The policies and the growth of trees are those of the engine; the drafts and the target's verdicts were recorded
    once, at every position of some texts, and time is what a table says. Neither a model nor vLLM is needed.
    Verification is strict: with the margin rule another text than the recorded one would go on.
    """
    try:
        table = costs_of(costs)
        recorded = Recording.read(recording.expanduser())
        if kinds is not None:
            recorded = recorded.only(words("--kinds", kinds))
        batches = integers("--batch", batch, 1, MOST_BATCH)
        chosen = named.parse(arms, "recorded")
        for arm in chosen:
            policy_maker(arm)
        followed = swept(chosen)
        directory = None if picture is None else _directory(picture, followed)
    except BadInput as error:
        typer.echo(f"simulate: {error}", err=True)
        raise typer.Exit(2) from None

    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    tried = Search(recorded) if search or directory is not None else None
    with console.status("decoding ..."):
        results = [simulate(recorded, table, size, chosen, tried if search else None) for size in batches]
    if not as_json:
        console.print(_origin(recorded, costs), style="dim")
        console.print(report(results, chosen))
    panels: dict[str, list[Choice]] = {}
    if directory is not None and tried is not None and followed is not None:
        with console.status("drawing ..."):
            panels = {name: choices(recorded, table, followed, tried, scale) for name, scale in _SWEEPS.items()}
            path = plots.draw(panels, f"What {followed.name} drafts under the costs {costs!r}, one request", directory)
        console.print(Text(f"written to {path}", style="dim"))
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "costs": {"name": costs} | table.to_dict(),
                    "recording": recorded.about | {"kinds": recorded.kinds, "texts": len(recorded.texts)},
                    "batches": [result.to_dict() for result in results],
                    "choices": {name: [asdict(choice) for choice in panel] for name, panel in panels.items()},
                },
                indent=1,
            )
        )


def _directory(given: Path, followed: Any) -> Path:
    if followed is None:
        raise BadInput("--plots", str(given), "a directory, with a cost-aware arm such as default among the arms")
    if not bench_plots.available():
        raise BadInput("--plots", str(given), "an environment with matplotlib (pip install 'adaptivespec-vllm[bench]')")
    return output_directory(given, "--plots")


def _origin(recording: Recording, costs: str) -> Text:
    about = recording.about
    tokens = sum(text.tokens for text in recording.texts)
    return Text(
        f"{len(recording.texts)} texts of {about.get('target')} with the head {about.get('head')}: "
        f"{', '.join(recording.kinds)}; {tokens} tokens, greedy. Costs: {costs}."
    )
