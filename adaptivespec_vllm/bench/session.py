"""One run from its options to its result: prompts made, engines started, turns taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from adaptivespec_vllm import runtime
from adaptivespec_vllm.bench import measure, memory, models
from adaptivespec_vllm.bench.engines import Engine, Server, check_memory
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.figures import summarise
from adaptivespec_vllm.bench.inputs import Inputs
from adaptivespec_vllm.bench.prompts import Encoded, batches, digest, encode
from adaptivespec_vllm.bench.result import Place, Result
from adaptivespec_vllm.bench.trace import trace
from adaptivespec_vllm.config import ConfigError, reason
from adaptivespec_vllm.provenance import provenance
from adaptivespec_vllm.screen import Steps

Plan = dict[Place, list[list[Encoded]]]


@dataclass
class Session:
    """A run that goes on; ``result`` holds at any time what was measured so far."""

    inputs: Inputs
    directory: Path
    console: Console
    result: Result
    engines: list[Engine] = field(default_factory=list)

    @classmethod
    def open(cls, inputs: Inputs, directory: Path, console: Console) -> Session:
        """Begin, with the record of where and how it runs."""
        result = Result(provenance=provenance(), settings={})
        if gpu := _gpu():
            result.provenance["machine"]["gpu"] = gpu
        return cls(inputs, directory, console, result)

    def run(self) -> None:
        """Measure everything; what is there when it ends early stays in ``result``."""
        self._warn_if_busy(runtime.busy(), "at the start")
        steps = Steps(self.console)
        with steps.step("making prompts, importing vLLM"):
            plan, server = self._prepare()
        self._start(server, steps)
        with self._progress(plan) as (tick, done):
            measure.run(
                self.result,
                self.engines,
                plan,
                tokens=self.inputs.tokens,
                repeats=self.inputs.repeats,
                parameters=measure.sampling(self.inputs.temperature, self.inputs.seed),
                tick=tick,
                done=done,
            )
        if self.inputs.temperature == 0:
            with steps.step("tracing one text"):
                self._trace(plan)
        self.result.complete = True

    def close(self) -> Path:
        """Make figures of what was measured, and write the result."""
        if self.result.samples:
            self._warn_if_busy(runtime.busy(), "meanwhile")
        self.result.memory = {"peak_resident_bytes": memory.peak_resident()}
        summarise(self.result)
        return self.result.write(self.directory)

    # --- preparing ---

    def _prepare(self) -> tuple[Plan, Server]:
        from adaptivespec_vllm.engine import head, seams

        device = seams.platform()
        with reading("--model", self.inputs.model, "a directory or hub id of a model with its tokenizer"):
            tokenizer, config = tokenizer_of(self.inputs.model), target_config(self.inputs.model)
        if self.inputs.head is not None:  # before any weights are loaded
            with reading("--head", self.inputs.head, "an EAGLE-3 head that fits the target"):
                head.check(self.inputs.head, head.TargetFacts.of_directory(self.inputs.model))
        plan = self._plan(tokenizer)
        server = self._server(plan, device, config)
        self.result.settings = {
            "model": models.fingerprint(self.inputs.model),
            "head": None if self.inputs.head is None else models.fingerprint(self.inputs.head),
            "device": device,
            "dtype": server.dtype,
            "mode": "eager" if server.enforce_eager else "compiled",
            "threads": runtime.threads(),
            "prompts": digest(prompt for groups in plan.values() for group in groups for prompt in group),
            "max_tokens": self.inputs.tokens,
            "temperature": self.inputs.temperature,
            "seed": self.inputs.seed,
            "max_model_len": server.max_model_len,
            "max_num_seqs": server.max_num_seqs,
            "max_num_batched_tokens": server.max_num_batched_tokens,
        }
        return plan, server

    def _plan(self, tokenizer: Any) -> Plan:
        plan: Plan = {}
        for place in self.inputs.places:
            encoded = [encode(tokenizer, prompt, place.context, self.inputs.seed) for prompt in self.inputs.prompts]
            plan[place] = batches(encoded, place.batch)
        largest = self.inputs.largest_batch
        kinds = [prompt.kind for prompt in self.inputs.prompts]
        few = [f"{kind} ({kinds.count(kind)})" for kind in dict.fromkeys(kinds) if kinds.count(kind) < largest]
        if few:
            self.warn(
                f"batches of up to {largest} have some requests more than once, for want of prompts: {', '.join(few)}"
            )
        return plan

    def _server(self, plan: Plan, device: str, config: Any) -> Server:
        groups = [group for groups in plan.values() for group in groups]
        longest = max(len(prompt.tokens) for group in groups for prompt in group)
        length = models.room(longest, self.inputs.tokens)
        most = getattr(config, "max_position_embeddings", None)
        if most is not None and length > most:
            raise BadInput(
                "--context" if self.inputs.longest_context else "--max-tokens",
                f"prompts of up to {longest} tokens and answers of {self.inputs.tokens}",
                f"{length} tokens with some to spare must fit into the model's {most}",
            )
        seqs = self.inputs.largest_batch
        server = Server.sized(
            self.inputs.model,
            config,
            device=device,
            dtype=self.inputs.dtype,
            eager=self.inputs.eager,
            length=length,
            requests=seqs,
            # A batch is prefilled in one step: no request decodes while another one's prompt is still read.
            batched_tokens=max(sum(len(prompt.tokens) for prompt in group) for group in groups),
            seed=self.inputs.seed,
        )
        told = check_memory(self.inputs.model, self.inputs.head, config, server, len(self.inputs.arms))
        self.console.print(f"  {told}", style="dim")
        return server

    # --- measuring ---

    def _start(self, server: Server, steps: Steps) -> None:
        for arm in self.inputs.arms:
            with steps.step(f"starting {arm.name}"):
                try:
                    engine = Engine.start(arm, server, len(self.inputs.arms))
                except Exception as error:
                    error.add_note(f"arm {arm.name!r} did not start")
                    raise
            self.engines.append(engine)
            self.result.arms.append(engine.info)

    def _trace(self, plan: Plan) -> None:
        """The first prompt once more with every arm of ours, step by step."""
        prompt, question = next(iter(plan.values()))[0][0], self.inputs.prompts[0].text
        parameters = measure.sampling(0.0, self.inputs.seed, logprobs=1)
        own = [engine for engine in self.engines if engine.arm.ours]
        self.result.traces = [trace(engine, prompt, question, self.inputs.tokens, parameters) for engine in own]

    @contextmanager
    def _progress(self, plan: Plan) -> Iterator[tuple[Any, Any]]:
        """A bar on a terminal, lines elsewhere; the result is written after each turn."""
        number = sum(map(len, plan.values())) * self.inputs.repeats
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self.console.print(Text(f"Measuring: {number} turns of {len(self.engines)} arms", style="bold"))
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            task = progress.add_task("warm-up", total=number * len(self.engines))
            turns = 0

            def tick(arm: str) -> None:
                progress.update(task, description=f"{arm:14}")

            def done() -> None:
                nonlocal turns
                turns += 1
                progress.advance(task, len(self.engines))
                self._warn_if_busy(runtime.busy(), "meanwhile")
                self.result.write(self.directory)
                if not self.console.is_terminal:
                    self.console.print(f"  turn {turns} of {number}", style="dim")

            yield tick, done

    def warn(self, warning: str) -> None:
        """Tell now, and keep for the report."""
        self.result.warnings.append(warning)
        self.console.print(Text(f"warning: {warning}", style="yellow"))

    def _warn_if_busy(self, load: float | None, when: str) -> None:
        if load is not None and not any("busy" in warning for warning in self.result.warnings):
            self.warn(
                f"the machine was busy {when} (load average {load:.1f}, {runtime.physical_cores()} cores): speeds and "
                "ratios are uncertain"
            )


@contextmanager
def reading(option: str, given: str, allowed: str) -> Iterator[None]:
    """Whatever goes wrong is the fault of what the option names: libraries raise anything for a bad model."""
    try:
        yield
    except Exception as error:
        why = str(error) if isinstance(error, ConfigError) else reason(error)
        raise BadInput(option, given, f"{allowed} ({why})") from None


def tokenizer_of(model: str) -> Any:
    """The tokenizer of a model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def target_config(model: str) -> Any:
    """Hugging Face configuration of a model's text part."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).get_text_config()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
