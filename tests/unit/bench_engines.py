"""Engines that decode by a rule, in place of vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from adaptivespec_vllm.bench.arms import Arm
from adaptivespec_vllm.bench.engines import Engine

TEXT = list(range(1000, 2000))
"""What every prompt is answered with."""


class FakeLLM:
    """Emits the first token of a request in a prefill step, then ``chunk`` tokens a step."""

    def __init__(self, chunk: int, on_step: Callable[[], None] = lambda: None, text: list[int] = TEXT) -> None:
        self.llm_engine = self
        self.chunk, self.on_step, self.text = chunk, on_step, text
        self.running: dict[str, tuple[int, int]] = {}
        self.worker = SimpleNamespace(model_runner=SimpleNamespace(_model_forward=on_step))
        self.counted = 0
        self.resets = 0

    def reset_prefix_cache(self) -> None:
        assert not self.running
        self.resets += 1

    def add_request(self, request: str, prompt: dict[str, list[int]], parameters: Any) -> None:
        assert request not in self.running and prompt["prompt_token_ids"]
        self.running[request] = 0, parameters

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        self.worker.model_runner._model_forward()
        outputs = []
        for request, (emitted, wanted) in list(self.running.items()):
            size = min(self.chunk if emitted else 1, wanted - emitted)
            tokens = self.text[emitted : emitted + size]
            self.counted += emitted > 0
            self.running[request] = emitted + size, wanted
            if emitted + size == wanted:
                del self.running[request]
            logprobs = [{token: SimpleNamespace(logprob=-0.5, decoded_token=f" {token}")} for token in tokens]
            own = SimpleNamespace(token_ids=tokens, logprobs=logprobs)
            outputs.append(SimpleNamespace(request_id=request, outputs=[own]))
        return outputs

    def collective_rpc(self, method: Any) -> list[Any]:
        if callable(method):
            return [method(self.worker)]
        steps, self.counted = self.counted, 0
        drafted = {"drafted_nodes": 3 * steps, "drafted_depth": 2 * steps, "drafted_width": steps}
        return [{"steps": steps, "promotions": steps, "seconds": {"verify": 0.001 * steps}} | drafted]


def engine(name: str, chunk: int, **options: Any) -> Engine:
    """An arm that decodes ``chunk`` tokens a step."""
    family: Any = "plain" if name == "plain" else name.partition(":")[0] if name.startswith("stock") else "policy"
    return Engine.of(Arm(name, family, None), FakeLLM(chunk, **options))
