"""Decoding one prompt with one engine, token by token, and what was measured on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adaptivespec_vllm import chat

if TYPE_CHECKING:
    from vllm import LLM

OnText = Callable[[str, int], None]
"""Called once a step with the new text and the number of tokens it came from."""


@dataclass
class Answer:
    """What one arm made of one prompt.

    The prefill emits the first token and drafts nothing to verify; times and counts of decoding begin after it.

    Attributes:
        tokens: token ids of the whole answer.
        steps: decoding steps, the prefill not counted.
        prefill_seconds: from the request to its first token.
        decode_seconds: from the first token to the last.
        engine: the engine's own counters for this prompt; empty where it keeps none.

    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def decoded(self) -> int:
        """Tokens emitted by decoding steps."""
        return max(0, len(self.tokens) - 1)


class Decoder:
    """Greedy decoding of single prompts by an engine that lives in this process."""

    def __init__(self, llm: LLM, *, counts: bool) -> None:
        """``counts``: the engine is one of ours and keeps counters."""
        self.llm = llm
        self._counts = counts
        self._requests = 0

    def encode(self, text: str) -> list[int]:
        """Token ids of a user message in the model's chat format."""
        return chat.encode(self.llm.get_tokenizer(), [{"role": "user", "content": text}])

    def decode(self, text: str, max_tokens: int, on_text: OnText) -> Answer:
        """Answer a user message, handing over the text as it comes."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        prompt = {"prompt_token_ids": self.encode(text)}
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
        self._read_counters()  # reading resets them
        self._requests += 1
        answer = Answer()
        started = first = last = time.perf_counter()
        engine.add_request(f"demo-{self._requests}", prompt, parameters)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                delta = output.outputs[0]
                if delta.token_ids:
                    if answer.tokens:
                        answer.steps += 1
                    else:
                        first = now
                    answer.tokens.extend(delta.token_ids)
                    last = now
                answer.text += delta.text
                on_text(delta.text, len(delta.token_ids))
        answer.prefill_seconds, answer.decode_seconds = first - started, last - first
        answer.engine = self._read_counters()
        return answer

    def _read_counters(self) -> dict[str, Any]:
        return self.llm.collective_rpc("adaptivespec_stats")[0] if self._counts else {}
