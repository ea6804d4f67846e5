"""Engines: one for each arm, all of them in this process, with the same server settings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from adaptivespec_vllm.bench import memory
from adaptivespec_vllm.bench.arms import Arm
from adaptivespec_vllm.bench.result import ArmInfo
from adaptivespec_vllm.bench.stopwatch import Stopwatch


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
