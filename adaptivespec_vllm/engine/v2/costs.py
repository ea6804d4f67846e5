"""What a step of the V2 runner costs: the same parts as on V1, with levels as they are drafted in a grid."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.forward_context import set_forward_context

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import GridBounds, expand_grid
from adaptivespec_vllm.engine.v1.costs import Measurement
from adaptivespec_vllm.types import TreeShape


class V2Measurement(Measurement):
    """The passes of a step over any number of rows, on made-up input; the clock waits for the device."""

    facts: ClassVar[dict[str, Any]] = {"model runner": "V2"}

    def _sync(self) -> None:
        torch.accelerator.synchronize()

    def _inputs(self, rows: int) -> dict[str, torch.Tensor]:
        buffers = self._runner.input_buffers
        return {"input_ids": buffers.input_ids[:rows], "positions": buffers.positions[:rows]}

    def _head_layers(self) -> set[str]:
        return set(self._runner.speculator.draft_attn_layer_names)

    def _first(self, rows: int) -> None:
        """vLLM's first pass with a row a request, and the best children of each."""
        runner, drafter = self._runner, self._runner.speculator
        model = drafter.model
        aux = drafter.hidden_states.new_zeros(rows, model.model.fc_input_size)
        with set_forward_context(None, runner.vllm_config, num_tokens=rows):
            hidden, _ = model(hidden_states=model.combine_hidden_states(aux), **self._inputs(rows))
        ops.topk_logprobs(drafter.head.logits(hidden), runner.max_width)

    def _grow(self, log_probs: torch.Tensor, tokens: torch.Tensor, depth: int) -> None:
        drafter, (trees, width) = self._runner.speculator, log_probs.shape
        device = self._runner.device
        roots = torch.zeros(trees, dtype=torch.int64, device=device)
        table = torch.zeros(trees, 1, dtype=torch.int32, device=device)
        hidden = drafter.hidden_states.new_zeros(trees, drafter.hidden_size)
        drafter.head.begin(hidden, roots.int(), table, width * (depth - 1))
        largest = TreeShape(depth, width, width * (1 + (depth - 1) * width))
        bounds = GridBounds(*(torch.full_like(roots, bound) for bound in largest))
        expand_grid(drafter.head, log_probs.to(device), tokens.to(device), bounds, roots, largest)
