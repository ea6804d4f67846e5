"""The V2 model runner that verifies and drafts trees.

Each override calls vLLM's method and adds what trees need around it. A step never waits for the device: sizes are known
on the host, everything else is tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from adaptivespec_vllm.attention import choose
from adaptivespec_vllm.config import AdaptiveSpecConfig
from adaptivespec_vllm.engine import refusals
from adaptivespec_vllm.engine.decision_log import DecisionLog
from adaptivespec_vllm.engine.target import eos_ids
from adaptivespec_vllm.engine.v1.cpu_attention import TreeCPUAttentionImpl
from adaptivespec_vllm.engine.v1.integrity import wanted
from adaptivespec_vllm.engine.v1.stats import WorkerStats
from adaptivespec_vllm.engine.v1.tree_attention import TreeAttentionStep
from adaptivespec_vllm.engine.v2 import integrity
from adaptivespec_vllm.engine.v2.costs import V2Measurement
from adaptivespec_vllm.engine.v2.cpu_attention import attach_trees
from adaptivespec_vllm.engine.v2.limits import RequestLimits
from adaptivespec_vllm.engine.v2.output import TreeOutput, VerifiedTrees
from adaptivespec_vllm.engine.v2.plan import Plan, Planner
from adaptivespec_vllm.engine.v2.sampler import TreeRejectionSampler
from adaptivespec_vllm.engine.v2.speculator import TreeSpeculator
from adaptivespec_vllm.engine.v2.step import PendingTrees, TreeStep
from adaptivespec_vllm.kv import commit_slots
from adaptivespec_vllm.policy.base import TreePolicy
from adaptivespec_vllm.rules import make_rule
from adaptivespec_vllm.types import MarginLimits, TreeShape

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class TreeModelState(DefaultModelState):
    """vLLM's model state, which builds the attention metadata; trees are attached to it."""

    runner: TreeModelRunner

    @classmethod
    def adopt(cls, state: DefaultModelState, runner: TreeModelRunner) -> TreeModelState:
        """The same state, with trees."""
        adopted = cls.__new__(cls)
        adopted.__dict__ = state.__dict__
        adopted.runner = runner
        return adopted

    def prepare_attn(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As vLLM's, with the trees of the step."""
        metadata = super().prepare_attn(input_batch, *args, **kwargs)
        self.runner.attach_trees(input_batch, metadata)
        return metadata


class TreeModelRunner(CPUModelRunner):
    """vLLM's V2 runner with trees, on a CPU."""

    measurement = V2Measurement
    """Measures what a step costs."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        settings = vllm_config.speculative_config.adaptivespec
        self.speculator = TreeSpeculator(vllm_config, device, self)
        self.pending = PendingTrees(self.max_num_reqs, self.num_speculative_steps, device)
        self.limits = RequestLimits(
            self.max_num_reqs, settings, eos_ids(self.model_config.hf_config.eos_token_id), device
        )
        self.decision_log = DecisionLog.from_environment() if self.parallel_config.rank == 0 else None
        self.planner = Planner(self.limits, self.scheduler_config.async_scheduling, self.decision_log)
        self.configure(settings)
        self.counted = WorkerStats()
        """What is counted outside outputs; it leaves with the next one."""
        self.totals = WorkerStats()
        self._records_requests = self.observability_config.per_request_spec_decode_metrics != "none"
        self.step: TreeStep | None = None
        self.plan: Plan | None = None
        """What was drafted last."""
        self._attention_steps: list[tuple[int, TreeAttentionStep]] = []
        self._verified: VerifiedTrees | None = None
        self.checks = wanted()

    def configure(self, settings: AdaptiveSpecConfig) -> None:
        """Use these settings from the next step on. Their cap must be the one that the scheduler knows."""
        self.settings = settings
        self.largest = TreeShape(settings.max_depth, settings.max_width, settings.max_nodes)
        """Of the grid that trees are expanded in."""
        self.max_depth, self.max_width = min(settings.max_depth, settings.max_nodes), settings.max_width
        least = settings.tree.min_path_probability
        self.least_value = math.log(least) if least else -math.inf
        self.rule = make_rule(settings)
        self.limits.configure(settings)
        self.planner.configure(settings)

    @property
    def policy(self) -> TreePolicy:
        """Decides how much is drafted."""
        return self.planner.policy

    @property
    def drafter(self) -> TreeSpeculator:
        """The speculator, under the name that the V1 runner has for it."""
        return self.speculator

    # --- start -------------------------------------------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load target and head, and teach their attention trees."""
        super().load_model(*args, **kwargs)
        if type(self.model_state) is not DefaultModelState:
            raise refusals.Unsupported(
                f"not supported with method 'adaptivespec' on the V2 model runner: a target whose state in vLLM is "
                f"{type(self.model_state).__name__}; set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self.model_state = TreeModelState.adopt(self.model_state, self)
        self.rejection_sampler = TreeRejectionSampler(self)
        refusals.check_layers(self.attention_layers(), self.model_config.dtype)
        self.attention_name, self.attention = choose(self.settings.attention, "cpu")
        for layer in self.attention_layers().values():
            layer.impl = TreeCPUAttentionImpl.adopt(layer.impl)

    def attention_layers(self) -> dict[str, Any]:
        """vLLM's attention layers of target and head that keep a KV cache, by name."""
        layers = self.compilation_config.static_forward_context
        return {
            name: layer
            for name, layer in layers.items()
            if isinstance(getattr(layer, "impl", None), CPUAttentionBackendImpl)
        }

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Learn where the cache keeps keys and values."""
        super().initialize_kv_cache(*args, **kwargs)
        for layer in self.attention_layers().values():
            layer.impl.bind(layer, layer.kv_cache)

    # --- a step, in order ----------------------------------------------------------------------------------------

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        for request in scheduler_output.preempted_req_ids or ():
            slot = self.req_states.req_id_to_index.get(request)
            if slot is not None:
                self.limits.pause(request, slot)
        for request in scheduler_output.finished_req_ids:
            self.limits.forget(request)
            self.planner.forget(request)
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            slot = self.req_states.req_id_to_index[new.req_id]
            self.planner.alive.add(new.req_id)
            self.limits.add(new.req_id, slot, new.sampling_params)
            self.speculator.backlog.forget(slot)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """A step's forward pass; the step's trees live from here to the end of ``sample_tokens``."""
        self.step = None
        self._attention_steps = []
        self.planner.begin_step(scheduler_output.num_scheduled_tokens)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> InputBatch:
        input_batch = super().prepare_inputs(*args, **kwargs)
        self.step = TreeStep.of(input_batch, self.req_states, self.pending)
        if self.plan is not None:
            self.step.drafting = self.plan.drafting
        input_batch.input_ids.clamp_(min=0)  # drafts that are none run along, and nothing is made of them
        return input_batch

    def _set_active_loras(self, prompt_lora_mapping: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """As vLLM's, with an adapter for every row of logits: a request has as many as its tree has rows."""
        if self.step is not None:
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, np.diff(self.step.start)).tolist())
        super()._set_active_loras(prompt_lora_mapping, *args, **kwargs)

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        assert self.step is not None
        self.step.place(input_batch, slot_mappings)
        return block_tables, slot_mappings

    def attach_trees(self, input_batch: InputBatch, metadata: dict[str, Any]) -> None:
        """Attach the trees of the step, if it has any, to its attention metadata."""
        step = self.step
        if step is not None and input_batch.num_draft_tokens and step.is_tree.any():
            self._attention_steps = attach_trees(
                step,
                input_batch,
                self.attn_groups,
                metadata,
                self.speculator.draft_attn_layer_names,
                self.attention,
            )

    def margin_limits(self, input_batch: InputBatch) -> MarginLimits | None:
        """The margin rule of each request in this step."""
        return self.limits.margins(input_batch.idx_mapping, input_batch.idx_mapping_np)

    def postprocess_sampled(
        self,
        idx_mapping: torch.Tensor,
        sampled_tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Before vLLM's own bookkeeping: commit what was accepted, and count it."""
        step = self.step
        if step is not None:
            step.emitting = num_sampled > 0
            if self.checks:
                integrity.check_step(self, step)
            self._verified = VerifiedTrees(step, (self.output_copy_stream, self.main_stream))
            if step.result is not None:
                self._commit(step)
                self.limits.count(idx_mapping, step.batch, step.result, step.emitting)
        super().postprocess_sampled(idx_mapping, sampled_tokens, num_sampled, *args, **kwargs)

    def _commit(self, step: TreeStep) -> None:
        """Write the keys and values of accepted draft rows, and of no others, to the cache."""
        assert step.result is not None
        assert step.sequential_slots is not None
        layers = self.compilation_config.static_forward_context
        for gid, attention in self._attention_steps:
            slots = commit_slots(step.result, step.root_rows, step.sequential_slots[gid])
            rows = attention.trees.rows
            slots = slots[: len(attention.trees)] if rows is None else slots[rows]
            for name, (key, value) in attention.trees.fresh.items():
                layer = layers[name]
                layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
            attention.trees.fresh.clear()

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Verification, commit, bookkeeping and drafting."""
        step = self.step
        try:
            output = super().sample_tokens(grammar_output)
            if step is not None and self.plan is not None and step.is_tree.all():
                self.planner.end_step(self.plan, int(step.start[-1]))
            if self.checks:
                integrity.check_kept(self)
        finally:
            self.step = None
        verified, self._verified = self._verified, None
        if verified is None:
            return output
        counted, self.counted = self.counted, WorkerStats()
        planned = self.planner.planned if self.scheduler_config.async_scheduling else {}
        return TreeOutput(output, verified, self.planner.verified, counted, self._records_requests, planned)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """How many nodes of each request are verified next, as lists of so many placeholders.

        Asked for by synchronous scheduling; asynchronous scheduling learns of it with the step's output.
        """
        drafts = super().take_draft_token_ids()
        if drafts is None or self.scheduler_config.async_scheduling:
            return drafts
        planned = self.planner.planned
        cut = [
            tokens[: planned.get(request, len(tokens))]
            for request, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        ]
        return DraftTokenIds(drafts.req_ids, cut)

    # --- what the speculator asks for ----------------------------------------------------------------------------

    def learn(self) -> None:
        """Tell the policy what became of trees, as far as the host knows."""
        for counted in self.planner.learn(self.req_states.req_id_to_index, self.counted):
            self.totals.add(counted)

    def make_plan(self, input_batch: InputBatch) -> Plan:
        """Decide how much this step drafts."""
        self.learn()
        slots, rows = input_batch.idx_mapping_np, input_batch.num_scheduled_tokens
        # A prompt that is not read to its end emits nothing.
        decoding = ~input_batch.is_prefilling_np | (
            input_batch.num_computed_tokens_np + rows >= input_batch.prefill_len_np
        )
        waiting = self.speculator.backlog.waiting[slots]
        self.plan = self.planner.plan(input_batch.req_ids, slots, decoding.tolist(), (rows + waiting).tolist())
        return self.plan
