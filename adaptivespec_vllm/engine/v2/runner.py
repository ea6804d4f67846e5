"""The V2 model runner that verifies and drafts trees.

Each override calls vLLM's method and adds what trees need around it. A step never waits for the device: sizes are known
on the host, everything else is tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from adaptivespec_vllm.attention import choose
from adaptivespec_vllm.config import LossyConfig
from adaptivespec_vllm.engine import refusals
from adaptivespec_vllm.engine.decision_log import DecisionLog
from adaptivespec_vllm.engine.learning import observe
from adaptivespec_vllm.engine.v1.cpu_attention import TreeCPUAttentionImpl
from adaptivespec_vllm.engine.v1.stats import WorkerStats
from adaptivespec_vllm.engine.v1.tree_attention import TreeAttentionStep
from adaptivespec_vllm.engine.v2.cpu_attention import attach_trees
from adaptivespec_vllm.engine.v2.limits import RequestLimits
from adaptivespec_vllm.engine.v2.output import TreeOutput, Verified
from adaptivespec_vllm.engine.v2.sampler import TreeRejectionSampler
from adaptivespec_vllm.engine.v2.speculator import TreeSpeculator
from adaptivespec_vllm.engine.v2.step import PendingTrees, TreeStep
from adaptivespec_vllm.kv import commit_slots
from adaptivespec_vllm.policy import make_policy
from adaptivespec_vllm.policy.base import TreePolicy
from adaptivespec_vllm.policy.recording import Recorded
from adaptivespec_vllm.types import MarginLimits, TreeShape

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

UNKNOWN_CONFIDENCE = 0.5
"""Of a request whose first tree is not verified yet."""


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

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.settings = settings = vllm_config.speculative_config.adaptivespec
        self.speculator = TreeSpeculator(vllm_config, device, self)
        self.pending = PendingTrees(self.max_num_reqs, self.num_speculative_steps, device)
        self.limits = RequestLimits(self.max_num_reqs, settings, self._eos_ids(), device)
        self.largest = TreeShape(settings.max_depth, settings.max_width, settings.max_nodes)
        """Of the grid that trees are expanded in."""
        self.max_depth = min(settings.max_depth, settings.max_nodes)
        least = settings.tree.min_path_probability
        self.least_value = math.log(least) if least else -math.inf
        self.decision_log = DecisionLog.from_environment() if self.parallel_config.rank == 0 else None
        self.policy: TreePolicy = make_policy(settings)
        if self.decision_log is not None:
            self.policy = Recorded(self.policy, self.decision_log.write)
        self._confidences: dict[str, float] = {}
        """The draft's probability of its own first choice, of the last tree of each request that the host knows of."""
        self._planned: list[int] = []
        """Nodes of each request's next tree, at most, in the order of the last batch."""
        self._alive: set[str] = set()
        """Requests that have begun and not ended; a preempted one has no slot."""
        self.verified = Verified()
        self.counted = WorkerStats()
        """What is counted outside outputs; it leaves with the next one."""
        self.totals = WorkerStats()
        self._records_requests = self.observability_config.per_request_spec_decode_metrics != "none"
        self.step: TreeStep | None = None
        self._attention_steps: list[tuple[int, TreeAttentionStep]] = []

    @property
    def drafter(self) -> TreeSpeculator:
        """The speculator, under the name that the V1 runner has for it."""
        return self.speculator

    def _eos_ids(self) -> set[int]:
        eos = self.model_config.hf_config.eos_token_id
        return {eos} if isinstance(eos, int) else set(eos or ())

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
            self._alive.discard(request)
            self.limits.forget(request)
            self.policy.forget(request)
            self.verified.promoted.pop(request, None)
            self._confidences.pop(request, None)
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            self._alive.add(new.req_id)
            self.limits.add(new.req_id, self.req_states.req_id_to_index[new.req_id], new.sampling_params)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """A step's forward pass; the step's trees live from here to the end of ``sample_tokens``."""
        self.step = None
        self._attention_steps = []
        return super().execute_model(*args, **kwargs)

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> InputBatch:
        input_batch = super().prepare_inputs(*args, **kwargs)
        self.step = TreeStep.of(input_batch, self.req_states, self.pending)
        input_batch.input_ids.clamp_(min=0)  # drafts that are none run along, and nothing is made of them
        return input_batch

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
        if step is not None and step.result is not None:
            step.emitting = num_sampled > 0
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
        finally:
            self.step = None
        if step is None or step.result is None:
            return output
        streams = self.output_copy_stream, self.main_stream
        counted, self.counted = self.counted, WorkerStats()
        return TreeOutput(output, step, streams, self.verified, counted, self._records_requests)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """How many nodes of each request are verified next, as lists of so many placeholders.

        Asked for by synchronous scheduling only; asynchronous scheduling plans the cap for every request.
        """
        drafts = super().take_draft_token_ids()
        if drafts is None or len(self._planned) != len(drafts.req_ids):
            return drafts
        cut = [tokens[:nodes] for tokens, nodes in zip(drafts.draft_token_ids, self._planned, strict=True)]
        return DraftTokenIds(drafts.req_ids, cut)

    # --- what the speculator asks for ----------------------------------------------------------------------------

    def learn(self) -> None:
        """Tell the policy what became of trees, as far as the host knows."""
        for counted, feedbacks in self.verified.take():
            self.totals.add(counted)
            feedbacks = {request: feedback for request, feedback in feedbacks.items() if request in self._alive}
            observe(self.policy, feedbacks, self._margin, self.settings, self.counted)
            self._confidences.update({r: f.confidence for r, f in feedbacks.items() if f.drafted_nodes})

    def _margin(self, request: str) -> LossyConfig | None:
        """The margin rule of a request; None where it has no slot."""
        slot = self.req_states.req_id_to_index.get(request)
        return None if slot is None else self.limits.overrides[slot].margin

    def shapes(self, input_batch: InputBatch) -> tuple[torch.Tensor, int]:
        """``int64 [B, 3]`` depth, width and nodes of each request's tree, at most; levels of the deepest one."""
        self.learn()
        requests = input_batch.req_ids
        drafting = self.policy.begin(requests, [True] * len(requests))
        bounds = drafting.bounds([self._confidences.get(request, UNKNOWN_CONFIDENCE) for request in requests])
        shapes = [
            self.limits.bound(slot, shape)
            for slot, shape in zip(input_batch.idx_mapping_np.tolist(), bounds, strict=True)
        ]
        self._planned = [shape.nodes for shape in shapes]
        levels = max(shape.depth for shape in shapes)
        return async_tensor_h2d(torch.tensor(shapes), device=self.device), levels
