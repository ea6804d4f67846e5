"""Engines: one for each arm, all of them in this process, with the same server settings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaptivespec_vllm.bench import memory, models
from adaptivespec_vllm.bench.arms import Arm
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.result import ArmInfo
from adaptivespec_vllm.bench.stopwatch import Stopwatch

SPARE_ROWS = 64
"""Rows of a draft tree that a request may add to what is batched."""

GB = 1e9


@dataclass(frozen=True)
class Server:
    """What all engines of a run have in common; the names are vLLM's."""

    model: str
    dtype: str
    enforce_eager: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int
    seed: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def sized(
        cls,
        model: str,
        config: Any,
        *,
        device: str,
        dtype: str | None,
        eager: bool | None,
        length: int,
        requests: int,
        batched_tokens: int,
        seed: int,
    ) -> Server:
        """Settings that hold so many requests of so many tokens, whatever else they are.

        Args:
            model: the target.
            config: its Hugging Face configuration.
            device: where it runs.
            dtype: None is float32 on a CPU, else the model's own.
            eager: None is what is usual on the device: compiled is what a server on a GPU runs; on a CPU it costs
                minutes an engine.
            length: tokens of a request, prompt and answer.
            requests: decoded together.
            batched_tokens: that a step should hold.
            seed: of the engine.

        """
        dtype = dtype or ("float32" if device == "cpu" else "auto")
        seqs = max(2, requests)
        return cls(
            model=model,
            dtype=dtype,
            enforce_eager=eager if eager is not None else device == "cpu",
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=max(2048, batched_tokens + requests * SPARE_ROWS),
            kv_cache_memory_bytes=models.kv_cache_bytes(config, seqs * length, models.element_bytes(dtype, config)),
            seed=seed,
        )

    def options(self, engines: int) -> dict[str, Any]:
        """Arguments of ``LLM``; with ``engines`` of them on a device none may ask for all of its memory."""
        own = {name: value for name, value in vars(self).items() if name != "more"}
        return own | {"gpu_memory_utilization": 0.9 / engines, "disable_log_stats": True} | self.more


@dataclass
class Engine:
    """An arm with its engine. Keep it: one that is collected tears down what all engines of a process share."""

    arm: Arm
    llm: Any
    info: ArmInfo
    stopwatch: Stopwatch | None
    requests: int = 0
    """Requests so far, of which their ids are made."""

    @classmethod
    def of(cls, arm: Arm, llm: Any, seconds: float = 0.0, resident: int = 0, device: int | None = None) -> Engine:
        """An arm with an engine that runs."""
        info = ArmInfo(
            name=arm.name,
            family=arm.family,
            lossless=arm.lossless,
            chain=arm.chain,
            speculative=arm.speculative,
            start_seconds=seconds,
            resident_bytes=resident,
            device_bytes=device,
        )
        return cls(arm, llm, info, None if arm.ours else Stopwatch(llm))

    @classmethod
    def start(cls, arm: Arm, server: Server, engines: int = 1) -> Engine:
        """Start one of ``engines`` engines."""
        from vllm import LLM

        started, resident, device = time.perf_counter(), memory.resident(), memory.device_allocated()
        llm = LLM(speculative_config=arm.speculative, **server.options(engines))
        grown = None if device is None else (memory.device_allocated() or 0) - device
        return cls.of(arm, llm, time.perf_counter() - started, memory.resident() - resident, grown)

    def counters(self) -> dict[str, Any]:
        """What the engine counted since the last call; of a stock one, its seconds alone."""
        if self.stopwatch is not None:
            return {"seconds": self.stopwatch.read()}
        counters: dict[str, Any] = self.llm.collective_rpc("adaptivespec_stats")[0]
        return counters


def check_memory(model: str, head: str | None, config: Any, server: Server, engines: int) -> str:
    """What so many engines in one process take, in words.

    Raises:
        BadInput: it is more than there is.

    """
    element = models.element_bytes(server.dtype, config)
    weights = models.weight_bytes(Path(model), element)
    if weights is None:  # a hub id: nothing to look at yet
        return f"{engines} engines will live in this process at once"
    if head is not None:
        weights += models.weight_bytes(Path(head), element) or 0
    each, available = weights + server.kv_cache_memory_bytes, memory.available()
    told = (
        f"{engines} engines at once, each about {each / GB:.1f} GB (weights {weights / GB:.1f}, keys and values "
        f"{server.kv_cache_memory_bytes / GB:.1f})"
    )
    if engines * each > available:
        allowed = f"what fits the {available / GB:.1f} GB available: fewer --arms, or a smaller --batch"
        raise BadInput("--arms", told, allowed)
    return f"{told}: {engines * each / GB:.1f} GB, of {available / GB:.1f} GB available"
