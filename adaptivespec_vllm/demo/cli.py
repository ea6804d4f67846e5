"""`adaptivespec demo`: four ways of decoding the same prompts on one model, side by side."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from adaptivespec_vllm import runtime
from adaptivespec_vllm.demo.arms import ARMS, KAPPA, Arm, choose
from adaptivespec_vllm.demo.decode import Answer, Decoder
from adaptivespec_vllm.demo.errors import DemoError
from adaptivespec_vllm.demo.model import DemoModel
from adaptivespec_vllm.demo.model import prepare as prepare_model
from adaptivespec_vllm.demo.prompts import PROMPTS, WARM_UP, Prompt
from adaptivespec_vllm.demo.report import Figures, as_json, by_kind, figures, table
from adaptivespec_vllm.provenance import provenance
from adaptivespec_vllm.screen import AnswerView, Steps, quiet, tail

DEFAULT_TOKENS = 64
WARM_UP_TOKENS = 12


def run(
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only prepare the model; the last line printed is JSON with its paths.")
    ] = False,
    tokens: Annotated[int, typer.Option("--tokens", min=2, max=512, help="Tokens a prompt.")] = DEFAULT_TOKENS,
    arms: Annotated[str, typer.Option("--arms", help="Comma-separated ways of decoding.")] = ",".join(ARMS),
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write every figure, with provenance, to this file.")
    ] = None,
) -> None:
    """Decode real prompts on this machine's CPU: plain vLLM, stock EAGLE-3, AdaptiveSpec strict and with margin."""
    if (missing := runtime.missing_vllm()) is not None:
        typer.echo(f"demo: {missing}", err=True)
        raise SystemExit(1)
    runtime.enter(reexecute=not prepare, HF_HUB_OFFLINE="1")
    cache = runtime.cache_dir()
    log = cache / ("prepare.log" if prepare else "demo.log")
    failure: str | None = None
    # --prepare is read by scripts: standard output carries its JSON line alone.
    with quiet(log, descriptor=2 if prepare else 1) as console:
        try:
            chosen = choose(arms)
            model = _prepare(cache, console)
            if not prepare:
                _compare(chosen, model, tokens, json_path, log, console)
        except DemoError as error:
            failure = f"{error}\n  what to do: {error.remedy}"
        except KeyboardInterrupt:
            failure = "stopped"
        except Exception as error:  # the engine may fail in any way; the user gets the cause and the log
            traceback.print_exc()
            failure = (
                f"{type(error).__name__}: {error}\n\nlast lines of {log}:\n{tail(log)}\n\n"
                f"  what to do: read {log}; `adaptivespec check` tells what this machine has, "
                "and `--arms plain` tries vLLM alone"
            )
    if failure is not None:
        typer.echo(f"demo: {failure}", err=True)
        raise SystemExit(1)
    if prepare:
        typer.echo(json.dumps({"model": str(model.model), "head": str(model.head)}))


def _prepare(cache: Path, console: Console) -> DemoModel:
    started = time.perf_counter()
    shown = False

    def progress(what: str) -> None:
        nonlocal shown
        if not shown:
            console.print(Text("Preparing SmolLM2-135M-Instruct (once)", style="bold"))
            shown = True
        console.print(f"  {what} ...", style="dim")

    model = prepare_model(cache, progress)
    if shown:
        console.print(f"  ready in {time.perf_counter() - started:.0f} s: {model.model}", style="dim")
    return model


@dataclass
class _Comparison:
    """One comparison: its engines, and the answers so far in the order of the prompts."""

    console: Console
    tokens: int
    decoders: dict[str, Decoder] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def start(self, arms: list[Arm], model: DemoModel) -> dict[str, float]:
        """Start an engine for each arm; returns the seconds of each step."""
        steps = Steps(self.console)
        with steps.step("importing vLLM"):
            import vllm  # noqa: F401
        for arm in arms:
            with steps.step(f"starting {arm.title}"):
                decoder = Decoder(arm.engine(model), counts=arm.chain is None)
                decoder.decode(WARM_UP.text, WARM_UP_TOKENS, lambda text, count: None)
            self.decoders[arm.name] = decoder
            self.answers[arm.name] = []
        return steps.seconds

    def answer(self, arm: Arm, prompt: Prompt) -> None:
        """One arm's answer to one prompt, streamed."""
        view = AnswerView(self.console, arm.title)
        answer = self.decoders[arm.name].decode(prompt.text, self.tokens, view.write)
        view.close(f"{len(answer.tokens)} tokens, {answer.steps} steps, {answer.decode_seconds:.1f} s")
        self.answers[arm.name].append(answer)


def _compare(
    arms: list[Arm], model: DemoModel, tokens: int, json_path: Path | None, log: Path, console: Console
) -> None:
    started = time.perf_counter()
    console.print(Text(f"Starting {len(arms)} engines", style="bold"), Text(f"(vLLM's own output: {log})", style="dim"))
    comparison = _Comparison(console, tokens)
    seconds = comparison.start(arms, model)
    ready = time.perf_counter()

    # Arms take turns prompt by prompt, so that whatever else the machine does falls on all of them alike.
    for number, prompt in enumerate(PROMPTS, start=1):
        console.print(Text(f"\n[{number}/{len(PROMPTS)}, {prompt.kind}] {prompt.text}", style="bold cyan"))
        for arm in arms:
            comparison.answer(arm, prompt)
    done = time.perf_counter()

    rows = [figures(arm, PROMPTS, comparison.answers) for arm in arms]
    console.print()
    console.print(table(rows, console.width))
    for note in _notes(arms, rows, tokens):
        console.print(note, style="dim")
    console.print(f"set-up {ready - started:.1f} s, decoding {done - ready:.1f} s", style="dim")
    if json_path is not None:
        seconds |= {"set-up": ready - started, "decoding": done - ready}
        origin = provenance(tokens=tokens, arms=[arm.name for arm in arms], dtype="float32", batch=1, temperature=0.0)
        report = as_json(rows, PROMPTS, comparison.answers, seconds, origin)
        json_path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        console.print(f"figures: {json_path}", style="dim")


def _notes(arms: list[Arm], rows: list[Figures], tokens: int) -> Iterator[str]:
    """What a reader of the table has to know."""
    yield (
        f"{len(PROMPTS)} prompts, at most {tokens} tokens each, batch 1, greedy, float32. tokens/s: without prefill. "
        "accepted length: tokens a step, the model's own included; depth, width, nodes: levels, widest level and "
        "tokens of the draft tree of a step."
    )
    others = [row.title for row in rows if row.arm != "plain"]
    if others and len(others) < len(rows):
        yield f"vs plain by kind of text ({', '.join(others)}): {by_kind(rows)}"
    if any(not arm.lossless for arm in arms):
        yield (
            f"margin: a drafted token that the model finds at least {KAPPA} times as likely as its own choice may "
            "pass (a promotion), so another text than plain decoding's is expected."
        )
    if (load := runtime.busy()) is not None:
        yield f"other programs were busy meanwhile (load average {load:.1f}): speeds and ratios are uncertain."
