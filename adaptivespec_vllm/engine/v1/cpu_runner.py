"""The V1 model runner with trees on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from adaptivespec_vllm import ops
from adaptivespec_vllm.attention import LayoutError, choose
from adaptivespec_vllm.engine.v1.cpu_attention import FALLBACK_ISA, TreeCPUAttentionImpl
from adaptivespec_vllm.engine.v1.cpu_proposer import CPUTreeProposer
from adaptivespec_vllm.engine.v1.runner import TreeModelRunner
from adaptivespec_vllm.engine.v1.step import Step
from adaptivespec_vllm.types import VerifyResult
from adaptivespec_vllm.verify import RequestMargin, verify_greedy

logger = init_logger("vllm.adaptivespec")  # below vLLM's own, so that it is shown


class CPUTreeModelRunner(TreeModelRunner, CPUModelRunner):
    """vLLM's CPU runner with trees."""

    stock_attention = (CPUAttentionBackendImpl,)

    def make_drafter(self, vllm_config: VllmConfig, device: torch.device) -> CPUTreeProposer:
        """Draws trees level by level, the policy asked before each."""
        return CPUTreeProposer(vllm_config, device, self)

    def teach_attention(self) -> None:
        """Tree rows by our op."""
        self.attention_name, self.attention = choose(self.settings.attention, "cpu")
        for layer in self.attention_layers().values():
            layer.impl = TreeCPUAttentionImpl.adopt(layer.impl)

    def describe_attention(self) -> str:
        """See :class:`TreeModelRunner`."""
        kernels = sorted({layer.isa for layer in self.attention_layers().values()})
        return f"vLLM's CPU kernel {' and '.join(map(repr, kernels))}; tree rows by {self.attention_name}"

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Learn where the cache keeps keys and values."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        for layer in self.attention_layers().values():
            try:
                layer.impl.bind(layer, layer.kv_cache)
            except LayoutError as error:
                self._choose_kernel(FALLBACK_ISA, str(error))
                layer.impl.bind(layer, layer.kv_cache)

    def _choose_kernel(self, isa: str, why: str) -> None:
        """Let vLLM's CPU attention use another kernel family for all layers."""
        logger.info("AdaptiveSpec uses vLLM's attention kernel '%s': %s", isa, why)
        groups = [group for groups in self.attn_groups for group in groups] + self.drafter.draft_attn_groups
        for group in groups:
            for builder in group.metadata_builders:
                builder.isa = isa
        for layer in self.attention_layers().values():
            layer.isa = isa

    def verify(self, logits: torch.Tensor, margins: Sequence[RequestMargin | None]) -> VerifyResult:
        """See :class:`TreeModelRunner`."""
        assert self.step is not None
        return verify_greedy(logits, self.step.batch, margins, self.step.max_depth, self.rule)

    def commit_rows(
        self, step: Step, fresh: Mapping[str, tuple[torch.Tensor, torch.Tensor]], slots: torch.Tensor
    ) -> None:
        """All layers in one call, as a call costs more here than the rows do."""
        keys, values = zip(*fresh.values(), strict=True)
        layers = self.compilation_config.static_forward_context
        key_caches, value_caches = zip(*(layers[name].impl.cache_views for name in fresh), strict=True)
        walk, rows = step.walk_of_tree_rows()
        ops.commit_kv(keys, values, key_caches, value_caches, *walk, slots[rows])
