"""The worker that runs AdaptiveSpec on a CPU; vLLM finds it through ``worker_cls``."""

from __future__ import annotations

import psutil
from vllm.logger import init_logger
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from adaptivespec_vllm.engine.v1.cpu_runner import CPUTreeModelRunner
from adaptivespec_vllm.engine.v1.worker import TreeWorker

logger = init_logger("vllm.adaptivespec")  # below vLLM's own, so that it is shown


class AdaptiveSpecCPUWorker(TreeWorker, CPUWorker):
    """vLLM's CPU worker with our model runner."""

    model_runner: CPUTreeModelRunner

    def init_device(self) -> None:
        """As vLLM's, which takes the runner's class from a global of its module."""
        self.check()
        stock = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = CPUTreeModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock

    def memory_left(self, available: int) -> int:
        """Bytes beside a KV cache of ``available`` bytes."""
        return int(psutil.virtual_memory().available) - available

    def compile_or_warm_up_model(self) -> object:
        """As vLLM's, which also sets the random state that requests begin with: measure before it."""
        self.begin()
        return super().compile_or_warm_up_model()
