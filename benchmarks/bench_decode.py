"""Decode the same prompts with several arms, interleaved prompt by prompt in one process, and print one line an arm.

    python benchmarks/bench_decode.py --model MODEL --head HEAD --prompts tests/e2e/data/prompts.jsonl

Arms: ``plain``, ``stock:K`` (vLLM's EAGLE-3 chain of K tokens), ``tree:D,W,N`` (a static tree), ``adaptive``. To an arm
of ours ``/P`` adds ``min_path_probability`` and ``@KAPPA`` the margin rule: ``tree:5,4,8/0.1@0.2``. Strict arms are
checked against the text of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaptivespec_vllm.demo.provenance import provenance

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

DEFAULT_ARMS = ["plain", "stock:1", "stock:2", "stock:3", "tree:3,4,3", "tree:5,4,8", "adaptive", "adaptive@0.2"]


@dataclass
class Arm:
    """One way to decode, and what it measured."""

    name: str
    llm: Any
    seconds: list[float] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    engine_steps: int = 0
    stats: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        return not self.name.startswith(("plain", "stock"))

    def tokens_per_second(self) -> float:
        return sum(self.emitted) / sum(self.seconds)

    def total(self, key: str) -> float:
        return sum(s[key] for s in self.stats)

    def section(self, name: str) -> float:
        return sum(s["seconds"].get(name, 0.0) for s in self.stats)


def speculative_config(name: str, head: str) -> dict[str, Any] | None:
    """The speculative config that an arm's name stands for."""
    base, _, kappa = name.partition("@")
    base, _, prune = base.partition("/")
    kind, _, rest = base.partition(":")
    if kind == "plain":
        return None
    if kind == "stock":
        return {"method": "eagle3", "model": head, "num_speculative_tokens": int(rest)}
    config: dict[str, Any] = {"method": "adaptivespec", "model": head}
    if kind == "tree":
        depth, width, nodes = (int(x) for x in rest.split(","))
        config["tree"] = {"policy": "static", "shape": {"depth": depth, "width": width, "nodes": nodes}}
    if prune:
        config.setdefault("tree", {})["min_path_probability"] = float(prune)
    if kappa:
        config["margin"] = {"kappa": float(kappa)}
    return config


def chunks(prompts: list[Any], size: int) -> Iterator[list[Any]]:
    for i in range(0, len(prompts), size):
        yield prompts[i : i + size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--prompts", required=True, type=Path, help='JSON Lines with "prompt" and "kind"')
    parser.add_argument("--arms", nargs="+", default=DEFAULT_ARMS)
    parser.add_argument("--kind", help="only prompts of this kind")
    parser.add_argument("--limit", type=int, default=12, help="prompts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a prompt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="vLLM's default mode instead of enforce_eager")
    parser.add_argument("--output", type=Path, help="write JSON here")
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    if args.kind:
        rows = [row for row in rows if row["kind"] == args.kind]
    rows = rows[:: max(1, len(rows) // args.limit)][: args.limit]
    arms = []
    for name in args.arms:
        llm = LLM(
            model=args.model,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=max(args.batch, 2),
            enforce_eager=not args.compiled,
            kv_cache_memory_bytes=256 << 20,
            speculative_config=speculative_config(name, args.head),
        )
        arms.append(Arm(name, llm))
    tokenizer = arms[0].llm.get_tokenizer()
    prompts = [
        {
            "prompt_token_ids": tokenizer.encode(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
                ),
                add_special_tokens=False,
            )
        }
        for row in rows
    ]
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    warm = SamplingParams(temperature=0, max_tokens=16)
    for arm in arms:
        arm.llm.generate(prompts[: args.batch], warm, use_tqdm=False)
        arm.llm.reset_prefix_cache()
        if arm.ours:
            arm.llm.collective_rpc("adaptivespec_stats")

    for batch in chunks(prompts, args.batch):
        for arm in arms:
            # The prompt's first token is not decoding: it is timed by a run of one token and taken off.
            arm.llm.reset_prefix_cache()
            started = time.perf_counter()
            arm.llm.generate(batch, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            prefill = time.perf_counter() - started
            arm.llm.reset_prefix_cache()
            if arm.ours:
                arm.llm.collective_rpc("adaptivespec_stats")
            started = time.perf_counter()
            outputs = arm.llm.generate(batch, params, use_tqdm=False)
            arm.seconds.append(time.perf_counter() - started - prefill)
            arm.emitted.append(sum(len(o.outputs[0].token_ids) - 1 for o in outputs))
            arm.texts += [list(o.outputs[0].token_ids) for o in outputs]
            if arm.ours:
                arm.stats.append(arm.llm.collective_rpc("adaptivespec_stats")[0])

    report(arms, args)


def report(arms: list[Arm], args: argparse.Namespace) -> None:
    """Print the table and write the JSON."""
    results = [measured(arm, arms[0]) for arm in arms]
    columns = {
        "tok/s": ("tokens_per_second", "8.2f"),
        "ratio": ("ratio", "7.3f"),
        "median": ("ratio_median", "7.3f"),
        "min": ("ratio_min", "6.2f"),
        "max": ("ratio_max", "6.2f"),
        "length": ("accepted_length", "7.2f"),
        "depth": ("drafted_depth", "6.2f"),
        "width": ("drafted_width", "6.2f"),
        "nodes": ("drafted_nodes", "6.2f"),
        "promoted": ("promotions", "9.0f"),
    }
    widths = {title: int(form.split(".")[0]) for title, (_, form) in columns.items()}
    print(f"{'arm':16}" + "".join(f"{title:>{width}}" for title, width in widths.items()) + "  same text")
    for line in results:
        cells = (f"{line[key]:{form}}" if key in line else "-".rjust(widths[t]) for t, (key, form) in columns.items())
        print(f"{line['arm']:16}{''.join(cells)}  {line['same_text']}/{line['prompts']}")
    for line in results:
        if "ms_per_step" in line:
            print(line["arm"], {section: round(ms, 2) for section, ms in line["ms_per_step"].items()})
    if args.output:
        args.output.write_text(
            json.dumps(
                {"provenance": provenance(**{k: str(v) for k, v in vars(args).items()}), "results": results}, indent=1
            )
        )


def measured(arm: Arm, plain: Arm) -> dict[str, Any]:
    """What an arm measured, beside plain decoding."""
    ratios = [
        (emitted / seconds) / (plain_emitted / plain_seconds)
        for seconds, emitted, plain_seconds, plain_emitted in zip(
            arm.seconds, arm.emitted, plain.seconds, plain.emitted, strict=True
        )
    ]
    line: dict[str, Any] = {
        "arm": arm.name,
        "tokens_per_second": arm.tokens_per_second(),
        "ratio": arm.tokens_per_second() / plain.tokens_per_second(),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "same_text": sum(a == b for a, b in zip(arm.texts, plain.texts, strict=True)),
        "prompts": len(arm.texts),
    }
    if arm.ours:
        steps, engine_steps = arm.total("steps"), arm.total("engine_steps")
        line |= {key: arm.total(key) / steps for key in ("drafted_depth", "drafted_width", "drafted_nodes")}
        line |= {"accepted_length": arm.total("emitted") / steps, "promotions": arm.total("promotions")}
        sections = sorted({section for stats in arm.stats for section in stats["seconds"]})
        line["ms_per_step"] = {section: 1e3 * arm.section(section) / engine_steps for section in sections}
        line["chains"] = [stats["chains"] for stats in arm.stats if stats["chains"]]
    return line


if __name__ == "__main__":
    main()
