"""The worker that runs AdaptiveSpec on NVIDIA GPUs; vLLM finds it through ``worker_cls``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from adaptivespec_vllm.engine.refusals import Unsupported
from adaptivespec_vllm.engine.v1.cuda_runner import CUDATreeModelRunner
from adaptivespec_vllm.engine.v1.worker import TreeWorker

logger = init_logger("vllm.adaptivespec")  # below vLLM's own, so that it is shown


GRAPHS = (None, CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE)


class AdaptiveSpecCUDAWorker(TreeWorker, Worker):
    """vLLM's GPU worker with our model runner."""

    model_runner: CUDATreeModelRunner

    def init_device(self) -> None:
        """As vLLM's, after everything that can be refused without the device."""
        self.check()
        for reason in unsupported(self.vllm_config):
            raise Unsupported(f"not supported with method 'adaptivespec': {reason}")
        use_piecewise_graphs(self.vllm_config.compilation_config)
        super().init_device()

    def _make_model_runner(self) -> CUDATreeModelRunner:
        if self.rank == 0:
            logger.info(
                "AdaptiveSpec runs on vLLM's V1 model runner; Model Runner V2 is not supported yet on this device"
            )
        return CUDATreeModelRunner(self.vllm_config, self.device)

    def memory_left(self, available: int) -> int:
        """Bytes beside a KV cache of ``available`` bytes."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free) - available

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's, which captures the graphs that the measured passes run in."""
        times = super().compile_or_warm_up_model()
        self.begin()
        return times


def unsupported(vllm_config: Any) -> Iterator[str]:
    """What works on a CPU or has no meaning there, but not with trees on a GPU: settings with the reason."""
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode not in GRAPHS:
        yield (
            f"cudagraph_mode={mode.name}: trees differ from step to step, so their attention stays outside of graphs; "
            "allowed: NONE, PIECEWISE, FULL_AND_PIECEWISE (taken as PIECEWISE)"
        )
    if vllm_config.speculative_config.adaptivespec.tree.policy == "talon":
        yield "tree.policy='talon': a beam of its own, which drafting ahead does not follow; allowed: any other"
    if vllm_config.parallel_config.use_ubatching:
        yield "enable_dbo=True: a tree's rows belong to one batch; allowed: False"
    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        yield "VLLM_USE_BREAKABLE_CUDAGRAPH=1: what the head returns is read outside of its graph; set it to 0"


def use_piecewise_graphs(compilation: Any) -> None:
    """Leave whole-model graphs out: they hold vLLM's own attention, without trees."""
    if compilation.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE:
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        logger.info("AdaptiveSpec uses piecewise CUDA graphs: attention of trees runs between them")
