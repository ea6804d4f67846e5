"""The worker that runs AdaptiveSpec on the V2 runner; vLLM finds it through ``worker_cls``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.cpu import model_runner as cpu_model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from adaptivespec_vllm.engine import head, ranks, refusals, seams
from adaptivespec_vllm.engine.v1.costs import facts_of
from adaptivespec_vllm.engine.v1.memory import memory_needs
from adaptivespec_vllm.engine.v1.stats import WorkerStats
from adaptivespec_vllm.engine.v2 import startup
from adaptivespec_vllm.engine.v2.runner import TreeModelRunner

logger = init_logger("vllm.adaptivespec")  # below vLLM's own, so that it is shown


class AdaptiveSpecCPUWorkerV2(CPUWorker):
    """vLLM's CPU worker with our V2 model runner."""

    model_runner: TreeModelRunner

    def init_device(self) -> None:
        """As vLLM's, which takes the runner's class from its module."""
        seams.require("worker", "V2")
        speculative = self.vllm_config.speculative_config
        ranks.check_build(speculative.built_by, speculative.adaptivespec)  # of one rank: others are refused
        refusals.check(self.vllm_config)
        head.install_loading()
        stock = cpu_model_runner.CPUModelRunner
        cpu_model_runner.CPUModelRunner = TreeModelRunner
        try:
            super().init_device()
        finally:
            cpu_model_runner.CPUModelRunner = stock

    def determine_available_memory(self) -> int:
        """As vLLM's, less what the largest batch will take beside the KV cache. A size that the user chose stays."""
        available = super().determine_available_memory()
        # Rows that are put off have had their place since the head was loaded.
        needs = replace(memory_needs(self.model_runner), backlog=0)
        if self.rank == 0:
            logger.info("AdaptiveSpec memory: %s", needs.describe())
        return available - needs.later if self.cache_config.kv_cache_memory_bytes is None else available

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's, once a step's costs are known and it is said what is on."""
        self.model_runner.planner.measure_costs(self.model_runner)
        if self.rank == 0:
            startup.announce(self.model_runner)
        return super().compile_or_warm_up_model()

    def finish_weight_update(self) -> None:
        """As vLLM's; whatever was derived from the head's weights follows them."""
        super().finish_weight_update()
        self.model_runner.speculator.adopt_weights()

    def adaptivespec_stats(self, reset: bool = True) -> dict[str, Any]:
        """Counters since the last reset (``WorkerStats``)."""
        self.model_runner.learn()
        stats = self.model_runner.totals.as_dict()
        if reset:
            self.model_runner.totals = WorkerStats()
        return stats

    def adaptivespec_costs(self) -> dict[str, Any] | None:
        """What a step costs here, with the facts that this depends on; None with a policy that does not ask."""
        costs = self.model_runner.planner.costs
        return None if costs is None else {"facts": facts_of(self.model_runner), "costs": costs.to_dict()}
