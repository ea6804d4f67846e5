"""Is strict greedy decoding with trees the text of plain decoding? Every mismatch is printed with its logit gap.

    python benchmarks/check_exactness.py --model MODEL --head HEAD --prompts tests/e2e/data/prompts.jsonl --batch 8

Arms: {arms}
Prompts are prefilled in chunks beside running requests, with prefix caching on. A text that differs is judged at its
first difference: plain decoding is asked for the log-probabilities of both tokens there. Below ``--tie`` nats apart it
is a near-tie that floating point decides; anything else is a fault, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaptivespec_vllm import runtime
from adaptivespec_vllm.bench.arms import ARMS_HELP, Arm, parse
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.prompts import Encoded, choose, encode, read
from adaptivespec_vllm.provenance import provenance

SHAPES = ["1,1,1", "3,1,3", "7,1,7", "3,4,3", "5,4,8", "7,4,16", "8,8,48"]
DEFAULT_ARMS = [*(f"tree:{shape}" for shape in SHAPES), "adaptive"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").format(arms=ARMS_HELP), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--prompts", required=True, type=Path, help='JSON Lines with "prompt" and "kind"')
    parser.add_argument("--arms", nargs="+", default=DEFAULT_ARMS)
    parser.add_argument("--limit", type=int, help="prompts of each kind, spread over the file")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a prompt")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tie", type=float, default=1e-4, help="nats below which two tokens tie")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "auto"])
    parser.add_argument("--compiled", action="store_true", help="with torch.compile, and CUDA graphs on a GPU")
    parser.add_argument("--attention", help="value of the key attention of arms of ours")
    parser.add_argument("--output", type=Path, help="write JSON here")
    args = parser.parse_args()
    runtime.enter(reexecute=True, VLLM_LOGGING_LEVEL="WARNING")

    settings = {
        "dtype": args.dtype,
        "enforce_eager": not args.compiled,
        "max_num_seqs": args.batch,
        "max_num_batched_tokens": 256,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
    }
    try:
        first, *arms = parse(" ".join(args.arms), args.head)
        chosen = choose(read(args.prompts), None, args.limit)
    except BadInput as error:
        parser.error(str(error))
    settings["gpu_memory_utilization"] = 0.9 / (1 + len(arms))
    plain = start(first, args.model, **settings)
    prompts = [encode(plain.get_tokenizer(), prompt, None, 0) for prompt in chosen]
    expected, seconds = decode(plain, prompts, args.tokens)
    print(f"plain: {len(prompts)} prompts, {sum(map(len, expected))} tokens, {seconds:.0f} s", flush=True)
    engines, results = [plain], []
    for arm in arms:
        if args.attention is not None:
            arm = replace(arm, speculative=arm.speculative | {"attention": args.attention})
        engines.append(llm := start(arm, args.model, **settings))
        llm.collective_rpc("adaptivespec_stats")
        texts, seconds = decode(llm, prompts, args.tokens)
        stats = llm.collective_rpc("adaptivespec_stats")[0]
        gaps = [
            {"id": prompt.id} | difference(plain, prompt, got, want)
            for prompt, got, want in zip(prompts, texts, expected, strict=True)
            if got != want
        ]
        for gap in gaps:
            print(f"  {gap['id']}: first difference at token {gap['at']}, {gap['nats']:.2e} nats apart", flush=True)
        result = {
            "arm": arm.name,
            "batch": args.batch,
            "prompts": len(prompts),
            "same": len(prompts) - len(gaps),
            "near_ties": sum(gap["nats"] < args.tie for gap in gaps),
            "gaps": gaps,
            "accepted_length": stats["emitted"] / stats["steps"],
            "chains": stats["chains"],
            "seconds": seconds,
        }
        results.append(result)
        print(
            f"{arm.name:14} batch {args.batch}: {result['same']}/{result['prompts']} the same, "
            f"{result['near_ties']} near-ties, accepted length {result['accepted_length']:.2f}, {seconds:.0f} s",
            flush=True,
        )
    if args.output:
        where = provenance(**{key: str(value) for key, value in vars(args).items()})
        args.output.write_text(json.dumps({"provenance": where, "results": results}, indent=1))
    faults = sum(result["prompts"] - result["same"] - result["near_ties"] for result in results)
    print("faults:", faults)
    return 1 if faults else 0


def start(arm: Arm, model: str, **settings: Any) -> Any:
    """An engine for an arm. Keep it: one that is collected tears down what all engines of the process share."""
    from vllm import LLM

    return LLM(
        model=model,
        max_model_len=1024,
        kv_cache_memory_bytes=256 << 20,
        speculative_config=arm.speculative,
        **settings,
    )


def decode(llm: Any, prompts: list[Encoded], tokens: int) -> tuple[list[list[int]], float]:
    """Greedy texts, and the seconds they took."""
    from vllm import SamplingParams

    started = time.perf_counter()
    texts = [{"prompt_token_ids": list(prompt.tokens)} for prompt in prompts]
    outputs = llm.generate(texts, SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], time.perf_counter() - started


def difference(plain: Any, prompt: Encoded, got: list[int], want: list[int]) -> dict[str, Any]:
    """Where two texts part, and how far apart plain decoding finds the two tokens there."""
    from vllm import SamplingParams

    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
    if at is None:  # one text is the beginning of the other
        return {"at": min(len(got), len(want)), "nats": math.inf}
    text = {"prompt_token_ids": [*prompt.tokens, *want[:at]]}
    output = plain.generate([text], SamplingParams(temperature=0, max_tokens=1, logprobs=20), use_tqdm=False)[0]
    entries = output.outputs[0].logprobs[0]
    if not {got[at], want[at]} <= entries.keys():
        return {"at": at, "nats": math.inf}
    return {"at": at, "nats": abs(entries[got[at]].logprob - entries[want[at]].logprob)}


if __name__ == "__main__":
    sys.exit(main())
