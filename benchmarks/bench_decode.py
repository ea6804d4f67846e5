"""Decode the same prompts with several arms, interleaved prompt by prompt in one process, and print one line an arm.

    python benchmarks/bench_decode.py --model MODEL --head HEAD --prompts tests/e2e/data/prompts.jsonl

{arms}
Strict arms are checked against the text of plain decoding, which must be the first arm. The first token of a prompt is
timed apart and not counted: figures are those of decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoding import ARMS_HELP, Prompt, encode, is_ours, read_prompts, start

from adaptivespec_vllm.provenance import provenance

DEFAULT_ARMS = ["plain", "stock:1", "stock:2", "stock:3", "tree:3,4,3", "tree:5,4,8", "adaptive", "adaptive@0.2"]

COLUMNS = {
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


@dataclass
class Arm:
    """One way to decode, and what it measured, a value for each batch of prompts."""

    name: str
    llm: Any
    seconds: list[float] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)

    def tokens_per_second(self) -> float:
        """Over all prompts."""
        return sum(self.emitted) / sum(self.seconds)

    def total(self, key: str) -> float:
        """Sum of a statistic of ours over all prompts."""
        return sum(s[key] for s in self.stats)

    def section(self, name: str) -> float:
        """Seconds of a section over all prompts."""
        return sum(s["seconds"].get(name, 0.0) for s in self.stats)

    def generate(self, prompts: list[Prompt], tokens: int) -> tuple[float, list[list[int]]]:
        """Decode from a cold prefix cache."""
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        if is_ours(self.name):
            self.llm.collective_rpc("adaptivespec_stats")
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)
        return time.perf_counter() - started, [list(output.outputs[0].token_ids) for output in outputs]

    def measure(self, prompts: list[Prompt], tokens: int) -> None:
        """Decode a batch and keep its figures."""
        prefill, _ = self.generate(prompts, 1)
        seconds, texts = self.generate(prompts, tokens)
        self.seconds.append(seconds - prefill)
        self.emitted.append(sum(len(text) - 1 for text in texts))
        self.texts += texts
        if is_ours(self.name):
            self.stats.append(self.llm.collective_rpc("adaptivespec_stats")[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").format(arms=ARMS_HELP), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--prompts", required=True, type=Path, help='JSON Lines with "prompt" and "kind"')
    parser.add_argument("--arms", nargs="+", default=DEFAULT_ARMS)
    parser.add_argument("--kind", help="only prompts of this kind")
    parser.add_argument("--limit", type=int, help="prompts, spread over the file")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a prompt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="vLLM's default mode instead of enforce_eager")
    parser.add_argument("--output", type=Path, help="write JSON here")
    args = parser.parse_args()

    rows = read_prompts(args.prompts, args.kind, args.limit)
    settings = {"enforce_eager": not args.compiled, "max_num_seqs": max(args.batch, 2)}
    arms = [Arm(name, start(name, args.model, args.head, **settings)) for name in args.arms]
    prompts = encode(arms[0].llm, rows)
    for arm in arms:
        arm.generate(prompts[: args.batch], 16)  # warm-up
    for first in range(0, len(prompts), args.batch):
        for arm in arms:
            arm.measure(prompts[first : first + args.batch], args.tokens)
        print(f"{min(first + args.batch, len(prompts))} of {len(prompts)} prompts", flush=True)
    report([measured(arm, arms[0], rows, args.batch) for arm in arms], args)


def measured(arm: Arm, plain: Arm, rows: list[dict[str, str]], batch: int) -> dict[str, Any]:
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
        "differing": [
            row["id"] for row, a, b in zip(rows, arm.texts, plain.texts, strict=True) if a != b and "@" not in arm.name
        ],
        "prompts": len(arm.texts),
    }
    kinds = [rows[i]["kind"] for i in range(0, len(rows), batch)]
    line["ratio_median_of_kind"] = {
        kind: statistics.median(ratio for ratio, k in zip(ratios, kinds, strict=True) if k == kind)
        for kind in dict.fromkeys(kinds)
    }
    if is_ours(arm.name):
        steps, engine_steps = arm.total("steps"), arm.total("engine_steps")
        line |= {key: arm.total(key) / steps for key in ("drafted_depth", "drafted_width", "drafted_nodes")}
        line |= {"accepted_length": arm.total("emitted") / steps, "promotions": arm.total("promotions")}
        sections = sorted({section for stats in arm.stats for section in stats["seconds"]})
        line["ms_per_step"] = {section: 1e3 * arm.section(section) / engine_steps for section in sections}
        line["chains"] = [stats["chains"] for stats in arm.stats if stats["chains"]]
    return line


def report(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the table and write the JSON."""
    widths = {title: int(form.split(".")[0]) for title, (_, form) in COLUMNS.items()}
    print(f"{'arm':16}" + "".join(f"{title:>{width}}" for title, width in widths.items()) + "  same text")
    for line in results:
        cells = (f"{line[key]:{form}}" if key in line else "-".rjust(widths[t]) for t, (key, form) in COLUMNS.items())
        print(f"{line['arm']:16}{''.join(cells)}  {line['same_text']}/{line['prompts']}")
    for line in results:
        print(line["arm"], "ratio by kind:", {kind: round(r, 2) for kind, r in line["ratio_median_of_kind"].items()})
        if "ms_per_step" in line:
            print("  ms a step:", {section: round(ms, 2) for section, ms in line["ms_per_step"].items()})
        if line["differing"]:
            print("  differing:", ", ".join(line["differing"]))
    if args.output:
        settings = {key: str(value) for key, value in vars(args).items()}
        args.output.write_text(json.dumps({"provenance": provenance(**settings), "results": results}, indent=1))


if __name__ == "__main__":
    main()
