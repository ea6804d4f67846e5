"""Proves that an installation works: vLLM finds the plugin, the ops are native, and two prompts are decoded with trees.

Usage: smoke_test.py [--model TARGET --head HEAD] [--no-engine]. Without a pair the demo's is decoded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

PROMPTS = ("What is 17 + 25? Think step by step.", "Write a Python function that reverses a string.")
TOKENS = 24


def command(*arguments: str) -> dict:
    """What a command of ours says in JSON."""
    done = subprocess.run(["adaptivespec", *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"smoke test: adaptivespec {' '.join(arguments)} failed: {done.stdout}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def installation() -> None:
    """The package's own check, and ops that are not the fallback in torch."""
    found = command("check", "--json")
    print(f"adaptivespec {found['adaptivespec']}, vllm {found['vllm']['version']} on {found['vllm']['platform']}")
    print(f"plugin: {found['plugin']}; ops: {found['ops']}")

    import torch

    from adaptivespec_vllm import ops

    if not ops.native_ops_loaded():
        sys.exit("smoke test: the native ops are not there")
    if torch.version.cuda is not None and not ops.cuda_ops_loaded():
        sys.exit("smoke test: this torch is a CUDA build, but the ops for CUDA are not there")


def decode(model: str, head: str) -> None:
    """Both prompts on one engine, and whether drafts were accepted."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
        speculative_config={"method": "adaptivespec", "model": head},
        disable_log_stats=False,
    )
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    answers = [output.outputs[0] for output in llm.chat(chats, SamplingParams(temperature=0, max_tokens=TOKENS))]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{prompt!r} -> {answer.text!r}")
        if len(answer.token_ids) != TOKENS:
            sys.exit(f"smoke test: {len(answer.token_ids)} tokens, asked for {TOKENS}")
    counts = {metric.name: metric for metric in llm.get_metrics()}
    lengths = counts["vllm:adaptivespec_accepted_length"]
    print(f"accepted length {lengths.sum / lengths.count:.2f} tokens a step")
    if counts["vllm:spec_decode_num_accepted_tokens"].value == 0:
        sys.exit("smoke test: no draft was accepted")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Proves that an installation of AdaptiveSpec works.")
    parser.add_argument("--model", help="target: a directory or a hub id")
    parser.add_argument("--head", help="its EAGLE-3 head: a directory or a hub id")
    parser.add_argument("--no-engine", action="store_true", help="look at the installation only")
    options = parser.parse_args()
    if bool(options.model) != bool(options.head):
        parser.error("--model and --head go together")
    installation()
    if not options.no_engine:
        pair = {"model": options.model, "head": options.head} if options.model else command("demo", "--prepare")
        decode(pair["model"], pair["head"])
    print("smoke test passed")
