"""Drafting on the V2 runner: vLLM's EAGLE speculator, with trees behind its first pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import GridBounds, TreeGrid, WorthOnDevice, expand_grid, grid_of
from adaptivespec_vllm.engine.v1.head import Eagle3Head
from adaptivespec_vllm.engine.v1.proposer import share_unadapted_layers
from adaptivespec_vllm.engine.v2.backlog import Backlog
from adaptivespec_vllm.types import TreeShape

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v2.plan import Plan
    from adaptivespec_vllm.engine.v2.runner import TreeModelRunner
    from adaptivespec_vllm.engine.v2.step import TreeStep

FIRST_PASS_ONLY = 1
"""Draft tokens that vLLM's speculator is asked for: those that its first pass gives."""


class TreeSpeculator(EagleSpeculator):
    """Drafts one tree a request.

    The first pass over the accepted tokens is vLLM's own and keeps the head's KV made of the target's true hidden
    states. The levels below it are ours.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: TreeModelRunner) -> None:
        super().__init__(vllm_config, device)
        self.runner = runner
        self.window = self.draft_model_config.max_model_len
        """Positions that the head can tell apart."""
        self.head: Eagle3Head | None = None
        self.backlog = Backlog(self.max_num_reqs, 0, self.dtype, device)
        self._sampled_hidden = torch.empty(0)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the head."""
        super().load_model(target_model)
        share_unadapted_layers(self.model)
        self.adopt_weights()
        self.backlog = Backlog(self.max_num_reqs, self.model.model.fc_input_size, self.dtype, self.device)

    def adopt_weights(self) -> None:
        """Make the head anew of the model's weights as they are now: it packs a copy of them."""
        self.head = Eagle3Head(self.model)

    def sample_draft(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In vLLM's first pass: keep the output at each request's last row; its tree grows from there, not a chain."""
        self._sampled_hidden = hidden_states
        return torch.zeros(len(hidden_states), dtype=torch.int64, device=self.device)

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        *args: Any,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft the trees of the batch and keep them; their tokens ``int64 [B, N]``, best first, -1 behind the last.

        Arguments as in vLLM.
        """
        step = self.runner.step
        first_pass = {"num_speculative_tokens": FIRST_PASS_ONLY}
        if step is None:  # vLLM's own dummy runs
            super().propose(
                input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
                *args, **kwargs, **first_pass,
            )  # fmt: skip
            return self.draft_tokens[: input_batch.num_reqs]
        plan = self.runner.make_plan(input_batch)
        if self._puts_off(input_batch, step, plan):
            assert aux_hidden_states is not None
            hidden = torch.cat([states[step.root_rows] for states in aux_hidden_states], dim=-1)
            self.backlog.put(input_batch.idx_mapping, input_batch.idx_mapping_np, hidden)
            return self._nothing(input_batch.num_reqs, self.num_speculative_steps).tokens
        self._catch_up(input_batch, step)
        accepted = step.sequence
        super().propose(
            replace(
                input_batch,
                input_ids=input_batch.input_ids[accepted],
                # Rows beyond the head's window are never drafted from, and must not crash.
                positions=step.positions.clamp(max=self.window - 1),
            ),
            attn_metadata,
            build_slot_mappings_by_layer(step.sequential_slots, self.kv_cache_config),
            last_hidden_states[accepted],
            [states[accepted] for states in aux_hidden_states] if aux_hidden_states else aux_hidden_states,
            num_sampled,
            *args,
            **kwargs,
            **first_pass,
        )
        roots = step.positions[self.last_token_indices[: input_batch.num_reqs]] + 1
        trees = self.draft(input_batch, num_sampled, roots)
        self.runner.pending.put(input_batch.idx_mapping, trees)
        return trees.tokens

    def draft(self, input_batch: InputBatch, num_sampled: torch.Tensor, roots: torch.Tensor) -> TreeGrid:
        """Trees behind the first pass.

        Args:
            input_batch: B requests.
            num_sampled: ``[B]``, 0 of requests that are only partly prefilled: they draft nothing.
            roots: ``int64 [B]``, position of each root.

        """
        runner, plan = self.runner, self.runner.plan
        assert plan is not None
        largest, levels = runner.largest, plan.levels
        if not levels:
            return self._nothing(len(roots), largest.nodes)
        assert self.head is not None
        bounds = self._bounds(self._to_device(np.array(plan.shapes)), num_sampled, roots)
        log_probs, ids = ops.topk_logprobs(self.head.logits(self._sampled_hidden), largest.width)
        self.head.begin(
            self.hidden_states[: len(roots)],
            roots.int(),
            self.block_tables.input_block_tables[self._group][: len(roots)],
            largest.width * (levels - 1),
        )
        worth = plan.drafting.worth()
        trees = expand_grid(
            self.head,
            log_probs,
            self.head.to_target(ids),
            bounds,
            roots,
            TreeShape(levels, largest.width, largest.nodes),
            None if worth is None else WorthOnDevice(worth, self._to_device),
        )
        forecast = runner.planner.forecast
        if forecast is not None:
            assert trees.ahead is not None
            requests = [r if emits else "" for r, emits in zip(input_batch.req_ids, plan.decoding, strict=True)]
            forecast.put(requests, trees.ahead, runner.output_copy_stream, runner.main_stream)
        return trees

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(values, device=self.device)

    def _puts_off(self, input_batch: InputBatch, step: TreeStep, plan: Plan) -> bool:
        """Whether this step needs no pass of the head: nobody drafts, and every request has one row, which can wait."""
        plain = not plan.levels and not input_batch.num_draft_tokens and bool(step.is_tree.all())
        return plain and self.backlog.has_room(input_batch.idx_mapping_np)

    def _catch_up(self, input_batch: InputBatch, step: TreeStep) -> None:
        """Run the head over the rows that wait, if any do, before this step's."""
        places = self.backlog.waiting[input_batch.idx_mapping_np].nonzero()[0]
        if not len(places):
            return
        assert self.head is not None
        at, group = self._to_device(places), self._group
        table = self.block_tables.input_block_tables[group][: input_batch.num_reqs][at]
        rows, start, slots = self.backlog.take(
            input_batch.idx_mapping_np[places],
            step.positions[step.root_rows[at]],
            self.runner.req_states.all_token_ids.gpu,
            table,
            self.block_tables.block_sizes[group],
        )
        self.head.first_pass(rows, start, table, slots)

    @property
    def _group(self) -> int:
        """KV cache group of the head's layers."""
        return next(gid for gid, groups in enumerate(self.attn_groups) if groups)

    def _bounds(self, shapes: torch.Tensor, num_sampled: torch.Tensor, roots: torch.Tensor) -> GridBounds:
        """The shapes made smaller where the sequence or the head's window ends.

        A step on a root at position P emits up to depth + 1 tokens, and its nodes occupy rows up to P + nodes. The head
        runs over nodes of all levels but the last, at positions P .. P + depth - 2.
        """
        depth, width, nodes = shapes.unbind(1)
        room = torch.where(num_sampled > 0, self.max_model_len - roots - 2, 0)
        depth = torch.minimum(torch.minimum(depth, room), self.window + 1 - roots).clamp(min=0)
        return GridBounds(depth, width, torch.minimum(nodes, room).clamp(min=0), self.runner.least_value)

    def _nothing(self, requests: int, nodes: int) -> TreeGrid:
        tokens = torch.full((requests, nodes), -1, device=self.device)
        return grid_of(tokens, torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.float32), levels=0)
