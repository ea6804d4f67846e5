"""Lossy rules at equal shapes on the real engine: tokens a step, nats given up, where texts part.

    python -m benchmarks.lossy_rules --shapes 4,4,5 --rules strict 0.2 mars typical --output rules.jsonl

A rule is what stands behind ``@`` in the arms of ``adaptivespec bench``: a kappa, or a rule with its keys
(``typical:epsilon=0.2``). One engine decodes all prompts with each arm, its drafts and its walk those of the product.
Time is not measured: what each step of a request would take alone follows from tables of costs, as in ``adaptivespec
simulate``. An arm that is in the output already is not decoded again, so a run that was stopped goes on.

``--eval DIRECTORY`` makes of the output what ``adaptivespec eval`` writes, with ``--table`` it is printed, with
``--drift`` window by window of long answers; no arm is decoded then.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adaptivespec_vllm import runtime
from adaptivespec_vllm.bench.arms import Arm, parse
from adaptivespec_vllm.bench.models import fingerprint
from adaptivespec_vllm.provenance import provenance
from benchmarks import lossy_figures

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "tests" / "e2e" / "data" / "prompts.jsonl"
MOST_NODES = 63
BATCH = 8
LEAST_LOSS = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["4,4,5"], help="of static trees")
    parser.add_argument("--rules", nargs="+", default=["strict", "0.2"], help="strict, kappas, rules")
    parser.add_argument("--arms", nargs="*", default=[], help="whole arms besides")
    parser.add_argument("--model", type=Path, help="target; the demo's without")
    parser.add_argument("--head", type=Path, help="its EAGLE-3 head; the demo's without")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON lines with "id", "kind", "prompt"')
    parser.add_argument(
        "--half", choices=["all", "first", "second"], default="all", help="every other prompt of a kind"
    )
    parser.add_argument("--limit", type=int, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--minutes", type=float, default=8.0, help="no further arm is begun after so many")
    parser.add_argument("--exercises", type=int, help="so many exercises of adaptivespec eval, in place of prompts")
    parser.add_argument("--output", type=Path, required=True, help="a line of JSON an arm is added")
    parser.add_argument("--eval", type=Path, help="write eval.json of the output here")
    parser.add_argument("--table", action="store_true", help="print the output as a table")
    parser.add_argument("--drift", action="store_true", help="print how it changes along the answers")
    args = parser.parse_args()
    if args.drift:
        lossy_figures.drift(args.output)
        return
    if args.eval is not None or args.table:
        lossy_figures.show(args.output, args.eval)
        return
    runtime.enter(reexecute=True, VLLM_LOGGING_LEVEL="WARNING", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    started = time.perf_counter()

    from adaptivespec_vllm.demo.model import prepare

    demo = prepare(runtime.cache_dir(), print)
    model, head = args.model or demo.model, args.head or demo.head
    names = [f"tree:{shape}" + ("" if rule == "strict" else f"@{rule}") for shape in args.shapes for rule in args.rules]
    arms = parse(" ".join([*names, *args.arms]), str(head))
    missing = [arm for arm in arms if arm.name not in done(args.output)]
    if not missing:
        return
    decoder = Decoder(model, head, args)
    for arm in missing:
        if time.perf_counter() - started > 60 * args.minutes:
            break
        row = decoder.decode(arm)
        with args.output.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        print(summary(row), flush=True)


def done(output: Path) -> set[str]:
    """Arms of a run so far."""
    if not output.exists():
        return set()
    return {json.loads(line)["arm"] for line in output.read_text(encoding="utf-8").splitlines()}


def summary(row: dict[str, Any]) -> str:
    texts = row["texts"]
    tokens, steps = (sum(text[name] for text in texts) for name in ("decoded", "steps"))
    lost = sum(nats for text in texts for _, nats in text["losses"])
    return f"{row['arm']}: {tokens / steps:.3f} tokens a step, {lost / tokens:.4f} nats a token, {row['wall']:.0f} s"


class Decoder:
    """One engine, whose settings change from arm to arm."""

    def __init__(self, model: Path, head: Path, args: argparse.Namespace) -> None:
        from vllm import LLM

        from adaptivespec_vllm.bench.prompts import Encoded, Prompt, encode, read
        from adaptivespec_vllm.eval.exercises import Exercises
        from adaptivespec_vllm.simulate.tables import SHIPPED, costs_of

        self._args, self._model, self._head = args, str(model), str(head)
        self._costs = {name: costs_of(name) for name in SHIPPED}
        shape = {"depth": 8, "width": 8, "nodes": 48}
        self._llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=512 + args.tokens + MOST_NODES,
            max_num_seqs=args.batch,
            kv_cache_memory_bytes=1 << 28,
            speculative_config={
                "method": "adaptivespec",
                "model": str(head),
                "num_speculative_tokens": MOST_NODES,
                "tree": {"policy": "static", "shape": shape},
            },
        )
        self._runner = self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        tokenizer = self._llm.get_tokenizer()
        self._exercises = None if args.exercises is None else Exercises(args.exercises, 0)
        if self._exercises is not None:
            texts = [(item, self._exercises.message(item)) for item in self._exercises.items]
            chosen = [Prompt(item.id, item.row["kind"], text) for item, text in texts]
        else:
            chosen = read(args.prompts)
        by_kind = defaultdict(list)
        for prompt in chosen:
            by_kind[prompt.kind].append(prompt)
        first, step = {"all": (0, 1), "first": (0, 2), "second": (1, 2)}[args.half]
        few = [prompt for own in by_kind.values() for prompt in own[first::step][: args.limit]]
        self._prompts = [
            encode(tokenizer, prompt, None, 0)
            if self._exercises is None
            else Encoded(prompt.id, prompt.kind, tuple(tokenizer.encode(prompt.text)))
            for prompt in few
        ]

    def decode(self, arm: Arm) -> dict[str, Any]:
        """All prompts with one arm."""
        from vllm import SamplingParams

        from adaptivespec_vllm.config import resolve

        self._runner.configure(resolve({**(arm.speculative or {}), "num_speculative_tokens": MOST_NODES}))
        self._llm.reset_prefix_cache()
        params = SamplingParams(
            temperature=0,
            max_tokens=self._args.tokens,
            logprobs=1,
            ignore_eos=self._args.ignore_eos,
            stop=None if self._exercises is None else list(self._exercises.stop),
            extra_args={"adaptivespec_max_nodes": 0} if arm.speculative is None else None,
        )
        inputs = [{"prompt_token_ids": list(prompt.tokens)} for prompt in self._prompts]
        started = time.perf_counter()
        with watched(self._runner, self._costs) as watch:
            outputs = self._llm.generate(inputs, params, use_tqdm=False)
        texts = []
        for prompt, output in zip(self._prompts, outputs, strict=True):
            own, steps = output.outputs[0], watch.of(list(prompt.tokens))
            texts.append(
                {
                    "id": prompt.id,
                    "kind": prompt.kind,
                    "text": own.text,
                    "correct": self._correct(prompt.id, own.text),
                    "tokens": list(own.token_ids),
                    "decoded": len(own.token_ids) - 1,  # the first one comes with the prompt
                    "finish": own.finish_reason,
                    "losses": list(losses(own)),
                    **steps,
                }
            )
        return {
            "arm": arm.name,
            "speculative": arm.speculative,
            "batch": self._args.batch,
            "most": self._args.tokens,
            "provenance": provenance(),
            "settings": {"model": fingerprint(self._model), "head": fingerprint(self._head)},
            "wall": time.perf_counter() - started,
            "texts": texts,
        }

    def _correct(self, id: str, text: str) -> bool | None:
        if self._exercises is None:
            return None
        return self._exercises.mark(next(item for item in self._exercises.items if item.id == id), text).correct


def losses(output: Any) -> Iterator[tuple[int, float]]:
    """Places of tokens that were not the target's first choice, and the nats that each gave up."""
    for place, (token, entries) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        loss = max(entry.logprob for entry in entries.values()) - entries[token].logprob
        if loss > LEAST_LOSS:
            yield place, round(loss, 5)


class Watch:
    """What became of each request's steps."""

    def __init__(self, costs: dict[str, Any]) -> None:
        self._costs = costs
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.levels: dict[str, list[int]] = {}
        self._rows: dict[str, int] = {}
        self._steps: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(costs, 0.0))

    def observe(self, feedbacks: dict[str, Any]) -> None:
        """A step's walks are done."""
        for request, feedback in feedbacks.items():
            if request in self._rows:  # else its prompt was read in this step
                levels = self.levels.pop(request, [])
                for name, costs in self._costs.items():
                    spent = costs.of_requests(1)(1 + feedback.drafted_nodes) + sum(map(costs.level, levels))
                    if feedback.drafted_nodes:
                        spent += costs.first(self._rows[request])
                    self._seconds[request][name] += float(spent)
                self._steps[request].append((feedback.accepted, feedback.drafted_nodes))
            self._rows[request] = feedback.accepted + 1

    def of(self, prompt: list[int]) -> dict[str, Any]:
        """Of the request with a prompt; no two have the same."""
        request = next(name for name, own in self.prompts.items() if own == tuple(prompt))
        steps = self._steps[request]
        return {
            "steps": len(steps),
            "accepted": [accepted for accepted, _ in steps],
            "nodes": sum(nodes for _, nodes in steps),
            "seconds": self._seconds[request],
        }


@contextmanager
def watched(runner: Any, costs: dict[str, Any]) -> Iterator[Watch]:
    """While it lasts, every step of a runner is counted."""
    from adaptivespec_vllm.engine.v1 import cpu_proposer

    watch = Watch(costs)
    observe, expand = runner.policy.observe, cpu_proposer.expand_trees

    def observed(feedbacks: dict[str, Any], *drafting: Any) -> None:
        for request in feedbacks:
            watch.prompts.setdefault(request, tuple(runner.requests[request].prompt_token_ids))
        watch.observe(feedbacks)
        observe(feedbacks, *drafting)

    def expanded(head: Any, *args: Any) -> Any:
        return expand(Tap(head, runner.input_batch.req_ids, watch.levels), *args)

    runner.policy.observe, cpu_proposer.expand_trees = observed, expanded
    try:
        yield watch
    finally:
        cpu_proposer.expand_trees = expand


class Tap:
    """A head whose rows are counted, level by level."""

    def __init__(self, head: Any, requests: Sequence[str], levels: dict[str, list[int]]) -> None:
        self._head, self._requests, self._levels = head, list(requests), levels
        levels.clear()

    def children(self, rows: Any, width: int) -> Any:
        starts = rows.start.tolist()
        for request, first, end in zip(self._requests, starts, starts[1:], strict=False):
            if end > first:
                self._levels.setdefault(request, []).append(end - first)
        return self._head.children(rows, width)


if __name__ == "__main__":
    main()
