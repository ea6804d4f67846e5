"""The command: a plain server for the answers, then ours under load."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer

from adaptivespec_vllm import runtime
from adaptivespec_vllm.bench.prompts import bundled, encode
from adaptivespec_vllm.demo.model import prepare
from adaptivespec_vllm.provenance import provenance
from benchmarks.soak.cases import Case, Pool, hostile
from benchmarks.soak.load import Outcome, load, plain_answers
from benchmarks.soak.report import shown, summary
from benchmarks.soak.server import Server, ServerDied

MAX_MODEL_LEN = 320
_SETTLE_SECONDS = 30

LARGEST_TREE = {"policy": "static", "shape": {"depth": 8, "width": 8, "nodes": 63}}


@dataclass(frozen=True)
class Settings:
    """What is run: target and speculative configuration, the load, and the server's room for keys and values."""

    model: Path
    options: dict[str, Any]
    load: str
    clients: int
    seconds: float
    kv_mb: int
    seed: int


def main(
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, max=120, help="Length of the load.")] = 1.0,
    clients: Annotated[int, typer.Option("--clients", min=1, max=256)] = 64,
    kind: Annotated[
        str, typer.Option("--load", help="mixed, or hostile: largest trees, many answers, rare grammars.")
    ] = "mixed",
    model: Annotated[Path | None, typer.Option("--model", help="Target; without: the demo's.")] = None,
    head: Annotated[Path | None, typer.Option("--head", help="Its head; without: the demo's.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Further keys of the speculative configuration.")
    ] = None,
    kv_mb: Annotated[int, typer.Option("--kv-mb", help="Keys and values of the server; small: preemptions.")] = 72,
    each: Annotated[int, typer.Option("--each", min=1, help="Cases of each kind.")] = 4,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    output: Annotated[
        Path | None, typer.Option("--json", help="Write the result here, and the servers' logs beside it.")
    ] = None,
) -> None:
    """Load a server with requests of every kind and check what can be known of the answers.

    Greedy and seeded answers are held against those of a plain server, token for token. The server has little room
    for keys and values, small prefill chunks and prefix caching; clients stream, leave and cancel. Exit status 1: an
    answer was wrong, a request failed that should not have, or something was left behind.
    """
    if kind not in ("mixed", "hostile"):
        raise typer.BadParameter(f"got {kind!r}; allowed: mixed, hostile", param_hint="--load")
    if model is None or head is None:
        demo = prepare(runtime.cache_dir(), lambda message: None)
        model, head = model or demo.model, head or demo.head
    options = {"method": "adaptivespec", "model": str(head)} | (json.loads(config.read_text()) if config else {})
    if kind == "hostile":
        options["tree"] = LARGEST_TREE
    pool = _pool(model, each, seed)
    settings = Settings(model, options, kind, clients, minutes * 60, kv_mb, seed)
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as temporary:
        logs = Path(temporary) if output is None else output.with_suffix(".logs")
        logs.mkdir(parents=True, exist_ok=True)
        try:
            result = asyncio.run(_run(settings, pool, logs, console))
        except ServerDied as death:
            console.print(f"FAULT {death}", markup=False)
            raise typer.Exit(1) from None
    console.print(shown(result))
    if output is not None:
        where = provenance(**asdict(settings) | {"model": str(model), "each": each})
        output.write_text(json.dumps({"provenance": where} | result, indent=1))
    raise typer.Exit(1 if result["faults"] else 0)


def _pool(model: Path, each: int, seed: int) -> Pool:
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [encode(tokenizer, prompt, None, seed).tokens for prompt in bundled()]
    return Pool(prompts, AutoConfig.from_pretrained(model).vocab_size, MAX_MODEL_LEN, each, seed)


async def _run(settings: Settings, pool: Pool, folder: Path, console: Console) -> dict[str, Any]:
    common = [str(settings.model), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    # Room for everything: nothing is preempted or prefilled in chunks in the reference.
    roomy = ["--kv-cache-memory-bytes", str(512 << 20), "--max-num-seqs", "8", "--max-num-batched-tokens", "4096"]
    scarce = [
        *("--kv-cache-memory-bytes", str(settings.kv_mb << 20), "--block-size", "32", "--max-num-seqs", "16"),
        # A tree of 63 nodes alone would take a step of 64 rows.
        *("--max-num-batched-tokens", "64" if settings.load == "mixed" else "512", "--enable-chunked-prefill"),
        "--enable-prefix-caching",
        *("--scheduling-policy", "priority"),
    ]
    plain = {}
    if settings.load == "mixed":
        async with Server([*common, *roomy, "--logprobs-mode", "processed_logprobs"], folder / "plain.log") as server:
            plain = await plain_answers(server, pool.cases)
        console.print(f"{len(plain)} cases decoded plainly", highlight=False)
    file = folder / "adaptivespec.json"
    file.write_text(json.dumps(settings.options))

    def draw(rng: random.Random) -> Case:
        return rng.choice(pool.cases) if settings.load == "mixed" else hostile(pool, rng)

    log = folder / "server.log"
    async with Server([*common, *scarce, "--speculative-config", str(file)], log) as server:
        await server.counters()
        outcome = await load(server, draw, plain, settings.clients, settings.seconds, settings.seed)
        metrics = await _settled(server)
        counters = await server.counters()
        await _alone(server, pool, plain, outcome)
        return summary(outcome, metrics, counters, server.faults())


async def _settled(server: Server) -> dict[str, float]:
    """Metrics once nothing runs, or after a while: disconnected requests are aborted a moment later."""
    for _ in range(_SETTLE_SECONDS):
        metrics = await server.metrics()
        if not metrics.get("vllm:num_requests_running") and not metrics.get("vllm:kv_cache_usage_perc"):
            break
        await asyncio.sleep(1)
    return metrics


async def _alone(server: Server, pool: Pool, plain: dict, outcome: Outcome) -> None:
    """After the load the server answers as before it."""
    strict = [case for case in pool.cases if case.strict and id(case) in plain][:8]
    after = await load(server, lambda rng: rng.choice(strict), plain, 1, 5.0, 0) if strict else Outcome()
    for kind, counts in after.verdicts.items():
        outcome.verdicts[kind] += counts
    outcome.faults += after.faults


if __name__ == "__main__":
    runtime.enter(reexecute=True)
    typer.run(main)
