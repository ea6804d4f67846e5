"""One text step by step: what was drafted for each step, and which of its tokens were not the target's own choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from adaptivespec_vllm.bench.engines import Engine
from adaptivespec_vllm.bench.measure import Parameters
from adaptivespec_vllm.bench.prompts import Encoded
from adaptivespec_vllm.bench.result import Trace, TracedStep, TracedToken

LEAST_LOSS = 1e-4
"""Nats from which a token counts as not the target's first choice: less is rounding."""


def trace(engine: Engine, prompt: Encoded, question: str, tokens: int, parameters: Parameters) -> Trace:
    """Decode a prompt alone, untimed.

    Args:
        engine: with nothing else to do.
        prompt: to be answered.
        question: its text.
        tokens: of the answer at most.
        parameters: greedy, with ``logprobs=1``.

    """
    driver = engine.llm.llm_engine
    engine.llm.reset_prefix_cache()
    engine.requests += 1
    driver.add_request(str(engine.requests), {"prompt_token_ids": list(prompt.tokens)}, parameters(0, tokens))
    steps = []
    while driver.has_unfinished_requests():
        emitted = [token for output in driver.step() for token in _tokens(output.outputs[0])]
        counted = engine.counters()
        if emitted:
            nodes, depth, width = (counted.get(f"drafted_{name}", 0) for name in ("nodes", "depth", "width"))
            steps.append(TracedStep(tokens=emitted, nodes=nodes, depth=depth, width=width))
    return Trace(arm=engine.arm.name, prompt=prompt.id, question=question, steps=steps)


def _tokens(output: Any) -> Iterator[TracedToken]:
    for token, entries in zip(output.token_ids, output.logprobs or [], strict=True):
        lost = max(entry.logprob for entry in entries.values()) - entries[token].logprob
        yield TracedToken(text=entries[token].decoded_token or "", lost=round(lost, 4) if lost > LEAST_LOSS else 0.0)
