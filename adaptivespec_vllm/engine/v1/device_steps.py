"""The parts of a step that are done on the device where looking at a number makes the host wait.

The host waits twice a step: for what the walk decided (which saves vLLM's own wait for the sampled tokens), and for
what was drafted. Batches that are not plainly greedy wait once a token of their walk, as each is a sampling step of
vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from vllm.config import VllmConfig

from adaptivespec_vllm import ops
from adaptivespec_vllm.engine.v1.cuda_costs import CUDAMeasurement
from adaptivespec_vllm.engine.v1.cuda_proposer import CUDATreeProposer
from adaptivespec_vllm.engine.v1.runner import TreeModelRunner
from adaptivespec_vllm.engine.v1.transfer import to_device, to_host
from adaptivespec_vllm.types import MarginLimits, TreeBatch, VerifyResult
from adaptivespec_vllm.verify import RequestMargin, acceptable_part, looking_ahead, margin_limits, worthwhile_part


class DeviceSteps(TreeModelRunner):
    """Verification and drafting with the device's numbers left where they are."""

    measurement = CUDAMeasurement

    def make_drafter(self, vllm_config: VllmConfig, device: torch.device) -> CUDATreeProposer:
        """Draws trees ahead."""
        return CUDATreeProposer(vllm_config, device, self)

    def verify(self, logits: torch.Tensor, margins: Sequence[RequestMargin | None]) -> VerifyResult:
        """See :class:`TreeModelRunner`; one wait."""
        step = self.step
        assert step is not None
        limits, chosen = margin_limits(margins), looking_ahead(margins)
        trees = TreeBatch(*self._uploaded(step.batch))
        if self.rule is not None and limits is not None:
            trees = acceptable_part(logits, trees, self.rule)
        if limits is not None:
            limits = MarginLimits(*self._uploaded(limits))
        if limits is not None and chosen is not None:
            trees = worthwhile_part(logits, trees, limits, to_device(chosen, self.device), step.max_depth)
        result = ops.walk_trees(logits, trees, limits, max_depth=step.max_depth)
        return VerifyResult(*to_host(*(getattr(result, field.name) for field in fields(result))))

    def _uploaded(self, tensors: TreeBatch | MarginLimits) -> list[torch.Tensor]:
        return [to_device(getattr(tensors, field.name), self.device) for field in fields(tensors)]
