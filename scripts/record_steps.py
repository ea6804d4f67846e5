#!/usr/bin/env python3
"""Record what a draft head proposes at every position of the target's texts, for ``adaptivespec simulate``.

    scripts/record_steps.py                     the recording that is shipped: the demo's model and head
    scripts/record_steps.py --model MODEL --head HEAD --output FILE

The engine decodes greedily and verifies nothing, so that every step emits one token and drafts behind it, with the
target's true hidden states of all tokens before. Behind each one, the trees of all widths up to 8 are grown to 10
levels (or as many as can be expanded) and 63 nodes: every tree of ``adaptivespec simulate`` lies within their union.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptivespec_vllm import runtime

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "tests" / "e2e" / "data" / "prompts.jsonl"
OUTPUT = ROOT / "adaptivespec_vllm" / "simulate" / "recordings" / "smollm2-135m.npz"
DEPTH = 10
MOST_DRAFTED = 63
BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="target; the demo's without")
    parser.add_argument("--head", type=Path, help="its EAGLE-3 head; the demo's without")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON lines with "id", "kind", "prompt"')
    parser.add_argument("--limit", type=int, default=6, help="prompts of each kind, spread over the file")
    parser.add_argument("--tokens", type=int, default=96, help="positions of each text")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    runtime.enter(reexecute=True)

    from adaptivespec_vllm.bench.prompts import choose, encode, read
    from adaptivespec_vllm.demo.model import prepare
    from adaptivespec_vllm.simulate.recording import Recording, write

    demo = prepare(runtime.cache_dir(), print)
    model, head = args.model or demo.model, args.head or demo.head
    started = time.perf_counter()
    llm = engine(model, head)
    prompts = [encode(llm.get_tokenizer(), prompt, None, 0) for prompt in choose(read(args.prompts), None, args.limit)]
    recorder = Recorder(llm)
    tokens = decode(llm, [prompt.tokens for prompt in prompts], args.tokens + DEPTH)
    texts = [
        {"id": prompt.id, "kind": prompt.kind, "positions": recorder.positions(prompt.tokens, text, args.tokens)}
        for prompt, text in zip(prompts, tokens, strict=True)
    ]
    about = {"target": model.name, "head": head.name, "dtype": "float32", "depth": DEPTH, "prompts": args.prompts.name}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write(args.output, texts, about)
    recording = Recording.read(args.output)
    positions = [position for text in recording.texts for position in text.positions]
    print(
        f"{len(texts)} texts, {len(positions)} positions, {sum(len(p.taken) for p in positions) / len(positions):.0f} "
        f"nodes each, {args.output.stat().st_size / 1e6:.2f} MB, {time.perf_counter() - started:.0f} s: {args.output}"
    )


def engine(model: Path, head: Path) -> Any:
    """An engine that drafts the largest trees."""
    from vllm import LLM

    shape = {"depth": DEPTH, "width": MOST_DRAFTED // (DEPTH - 1), "nodes": MOST_DRAFTED}
    return LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=BATCH,
        kv_cache_memory_bytes=256 << 20,
        speculative_config={
            "method": "adaptivespec",
            "model": str(head),
            "tree": {"policy": "static", "shape": shape},
        },
    )


def decode(llm: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Greedy texts."""
    from vllm import SamplingParams

    texts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(texts, SamplingParams(temperature=0, max_tokens=tokens, detokenize=False), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


class Recorder:
    """Stands in for the expansion of an engine: keeps what the head says, and hands no nodes on."""

    def __init__(self, llm: Any) -> None:
        from adaptivespec_vllm.engine.v1 import cpu_proposer
        from adaptivespec_vllm.simulate.recording import CHILDREN

        self._runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._runner.max_width = CHILDREN
        self._expand_stock, cpu_proposer.expand_trees = cpu_proposer.expand_trees, self._expand
        self._drafts: dict[tuple[tuple[int, ...], int], dict[tuple[int, ...], Any]] = {}
        """By prompt and position: of each node that the head ran over, by the tokens below the root, its children."""

    def positions(self, prompt: Sequence[int], text: Sequence[int], most: int) -> list[tuple[Any, ...]]:
        """What was drafted behind the tokens of a text but the last, for a recording."""
        roots = range(min(most, len(text) - 1))
        return [packed(self._drafts[tuple(prompt), len(prompt) + i], text[i + 1 :]) for i in roots]

    def _expand(
        self, head: Any, log_probs: Any, tokens: Any, shapes: Sequence[Any], roots: Sequence[int], steering: Any
    ) -> list[Any]:
        from adaptivespec_vllm.simulate.recording import CHILDREN
        from adaptivespec_vllm.types import NO_TREE, DraftTree, TreeShape

        runner, hidden = self._runner, head._hidden
        drafts: list[dict[tuple[int, ...], Any]] = [{} for _ in shapes]
        for b, request in enumerate(runner.input_batch.req_ids):
            if shapes[b].nodes:
                drafts[b][()] = tokens[b].tolist(), log_probs[b].numpy()
                self._drafts[tuple(runner.requests[request].prompt_token_ids), roots[b]] = drafts[b]
        for width in range(1, CHILDREN + 1):
            shape = TreeShape(min(DEPTH, 1 + MOST_DRAFTED // width), width, MOST_DRAFTED)
            head._hidden = hidden  # each tree begins at the first pass
            self._expand_stock(
                Tap(head, drafts),
                log_probs,
                tokens,
                [shape if own.nodes else NO_TREE for own in shapes],
                roots,
                Everything(),
            )
        return [DraftTree([], [], root) for root in roots]


class Tap:
    """A head whose answers are kept.

    Args:
        head: answers.
        drafts: of each request, what is kept.

    """

    def __init__(self, head: Any, drafts: list[dict[tuple[int, ...], Any]]) -> None:
        self._head = head
        self._drafts = drafts
        self._paths: list[tuple[int, ...]] = [()] * len(drafts)

    def children(self, rows: Any, width: int) -> tuple[Any, Any]:
        from adaptivespec_vllm.simulate.recording import CHILDREN

        log_probs, tokens = self._head.children(rows, CHILDREN)
        before = [self._paths[row] for row in rows.parent_rows.tolist()]
        self._paths = [(*path, token) for path, token in zip(before, rows.tokens.tolist(), strict=True)]
        starts = rows.start.tolist()
        for drafts, first, end in zip(self._drafts, starts, starts[1:], strict=False):
            for row in range(first, end):
                drafts.setdefault(self._paths[row], (tokens[row].tolist(), log_probs[row].numpy()))
        return log_probs[:, :width], tokens[:, :width]


class Everything:
    """Steers trees to their full shapes."""

    beam = None

    def values(self, log_probs: Any, owners: Any, depth: int) -> Any:
        return log_probs

    def expand(self, frontiers: Sequence[Any], candidates: Sequence[Any]) -> list[int]:
        return [len(values) for values in frontiers]

    def keep(self, candidates: Sequence[Any]) -> list[int]:
        return [len(values) for values in candidates]


def packed(drafts: dict[tuple[int, ...], Any], rest: Sequence[int]) -> tuple[Any, ...]:
    """The nodes behind one token as a recording keeps them, and which of them the text goes on with."""
    import numpy as np

    paths = sorted(drafts, key=len)
    index = {path: i for i, path in enumerate(paths)}
    parents, ranks, taken = [0], [0], []
    for path in paths:
        tokens = drafts[path][0]
        if path:
            parents.append(index[path[:-1]])
            ranks.append(drafts[path[:-1]][0].index(path[-1]))
        follows = len(path) < len(rest) and tuple(rest[: len(path)]) == path and rest[len(path)] in tokens
        taken.append(tokens.index(rest[len(path)]) if follows else -1)
    return np.stack([drafts[path][1] for path in paths]), np.array(parents), np.array(ranks), np.array(taken)


if __name__ == "__main__":
    main()
