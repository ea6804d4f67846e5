"""What a worker of vLLM does besides, on any device, to run AdaptiveSpec on the V1 runner."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from adaptivespec_vllm.engine import head, ranks, refusals, seams
from adaptivespec_vllm.engine.spec_config import AdaptiveSpecSpeculativeConfig
from adaptivespec_vllm.engine.v1 import startup
from adaptivespec_vllm.engine.v1.costs import facts_of
from adaptivespec_vllm.engine.v1.memory import memory_needs
from adaptivespec_vllm.engine.v1.runner import TreeModelRunner
from adaptivespec_vllm.engine.v1.stats import WorkerStats

logger = init_logger("vllm.adaptivespec")  # below vLLM's own, so that it is shown


class TreeWorker:
    """Mixed into a worker of vLLM, before it; a platform's own worker builds the runner."""

    model_runner: TreeModelRunner

    @property
    def _speculative(self) -> AdaptiveSpecSpeculativeConfig:
        return self.vllm_config.speculative_config

    def init_device(self) -> None:
        """As vLLM's; then the ranks can hear of each other, and compare themselves."""
        super().init_device()
        ranks.check_ranks(self._speculative.built_by, self.device.type)

    def check(self) -> None:
        """Before the runner is built: refuse what is not supported, and let heads load."""
        seams.require("worker")
        ranks.check_build(self._speculative.built_by, self._speculative.adaptivespec)
        refusals.check(self.vllm_config)
        head.install_loading()

    def begin(self) -> None:
        """When everything is loaded: what a step costs, and the block in the log that says what is on."""
        self.model_runner.measure_costs()
        if self.rank == 0:
            startup.announce(self.model_runner)

    def memory_left(self, available: int) -> int:
        """Bytes beside a KV cache of ``available`` bytes, whose size the user chose."""
        raise NotImplementedError

    def determine_available_memory(self) -> int:
        """As vLLM's, less what the largest batch will take beside the KV cache. A size that the user chose stays."""
        available = super().determine_available_memory()
        needs = memory_needs(self.model_runner)
        if self.rank == 0:
            logger.info("AdaptiveSpec memory: %s", needs.describe())
        if self.cache_config.kv_cache_memory_bytes is None:
            return available - needs.later
        left = self.memory_left(available)
        if left < needs.later:
            logger.warning(
                "AdaptiveSpec may run out of memory: the KV cache is set to %.2f GiB, which leaves %.2f GiB, and the "
                "largest batch takes up to %.2f GiB besides. Decrease --kv-cache-memory-bytes or --max-num-seqs",
                *(count / (1 << 30) for count in (available, max(left, 0), needs.later)),
            )
        return available

    def finish_weight_update(self) -> None:
        """As vLLM's; whatever was derived from the head's weights follows them."""
        super().finish_weight_update()
        self.model_runner.drafter.adopt_weights()

    def adaptivespec_stats(self, reset: bool = True) -> dict[str, Any]:
        """Counters since the last reset (``WorkerStats``)."""
        stats = self.model_runner.totals.as_dict()
        if reset:
            self.model_runner.totals = WorkerStats()
        return stats

    def adaptivespec_costs(self) -> dict[str, Any] | None:
        """What a step costs here, with the facts that this depends on; None with a policy that does not ask."""
        costs = self.model_runner.costs
        return None if costs is None else {"facts": facts_of(self.model_runner), "costs": costs.to_dict()}
