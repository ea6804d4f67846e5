"""Is strict greedy decoding with trees the text of plain decoding? Every mismatch is printed with its logit gap.

    python benchmarks/check_exactness.py --model MODEL --head HEAD --prompts tests/e2e/data/prompts.jsonl --batch 8

A text that differs is judged at its first difference: plain decoding is asked for the log-probabilities of both
tokens there. Below ``--tie`` nats apart it is a near-tie that floating point decides; anything else is a fault, and the
exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

SHAPES = ["1,1,1", "3,1,3", "7,1,7", "3,4,3", "5,4,8", "7,4,16", "8,8,48", "adaptive"]


def speculative_config(head: str, shape: str) -> dict[str, Any]:
    config: dict[str, Any] = {"method": "adaptivespec", "model": head}
    if shape != "adaptive":
        depth, width, nodes = (int(x) for x in shape.split(","))
        config["tree"] = {"policy": "static", "shape": {"depth": depth, "width": width, "nodes": nodes}}
    return config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--prompts", required=True, type=Path, help='JSON Lines with "prompt" and "kind"')
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="depth,width,nodes, or adaptive")
    parser.add_argument("--limit", type=int, default=10_000, help="prompts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a prompt")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tie", type=float, default=1e-4, help="nats below which two tokens tie")
    parser.add_argument("--output", type=Path, help="write JSON here")
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()][: args.limit]

    def engine(config: dict[str, Any] | None) -> Any:
        return LLM(
            model=args.model,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=args.batch,
            max_num_batched_tokens=256,  # prompts are prefilled in chunks beside running requests
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            enforce_eager=True,
            kv_cache_memory_bytes=256 << 20,
            speculative_config=config,
        )

    engines = [engine(None)]  # kept: one that is collected tears down what all of them share
    plain = engines[0]
    tokenizer = plain.get_tokenizer()
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    prompts = [
        {
            "prompt_token_ids": tokenizer.encode(
                tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
                add_special_tokens=False,
            )
        }
        for chat in chats
    ]
    params = SamplingParams(temperature=0, max_tokens=args.tokens)

    def decode(llm: Any) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    def gap(prompt: dict[str, list[int]], before: list[int], one: int, other: int) -> float:
        text = {"prompt_token_ids": prompt["prompt_token_ids"] + before}
        output = plain.generate([text], SamplingParams(temperature=0, max_tokens=1, logprobs=20), use_tqdm=False)[0]
        entries = output.outputs[0].logprobs[0]
        values = [entries[t].logprob if t in entries else -1e9 for t in (one, other)]
        return abs(values[0] - values[1])

    started = time.perf_counter()
    expected = decode(plain)
    print(
        f"plain: {len(prompts)} prompts, {sum(map(len, expected))} tokens, {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    faults, results = 0, []
    for shape in args.shapes:
        llm = engine(speculative_config(args.head, shape))
        engines.append(llm)
        llm.collective_rpc("adaptivespec_stats")
        started = time.perf_counter()
        texts = decode(llm)
        seconds = time.perf_counter() - started
        stats = llm.collective_rpc("adaptivespec_stats")[0]
        gaps = []
        for row, prompt, got, want in zip(rows, prompts, texts, expected, strict=True):
            if got == want:
                continue
            at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
            nats = gap(prompt, want[:at], got[at], want[at]) if at < min(len(got), len(want)) else float("inf")
            gaps.append(nats)
            print(f"  {row['id']}: first difference at token {at}, {nats:.2e} nats apart", flush=True)
        faults += sum(nats >= args.tie for nats in gaps)
        result = {
            "shape": shape,
            "same": len(prompts) - len(gaps),
            "prompts": len(prompts),
            "near_ties": sum(nats < args.tie for nats in gaps),
            "gaps": gaps,
            "accepted_length": stats["emitted"] / stats["steps"],
            "chains": stats["chains"],
            "seconds": seconds,
        }
        results.append(result)
        print(
            f"{shape:10} batch {args.batch}: {result['same']}/{result['prompts']} the same, "
            f"{result['near_ties']} near-ties, accepted length {result['accepted_length']:.2f}, {seconds:.0f} s",
            flush=True,
        )
    if args.output:
        args.output.write_text(
            json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, "results": results}, indent=1)
        )
    print("faults:", faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
