"""The V1 model runner that verifies and drafts trees, on any device.

Each override calls vLLM's method and adds what trees need around it; see ``docs/architecture.md`` for the order of a
step. ``cpu_runner`` and ``cuda_runner`` put it before vLLM's runner of their platform and say what differs there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from adaptivespec_vllm.attention import TreeAttention
from adaptivespec_vllm.config import AdaptiveSpecConfig
from adaptivespec_vllm.engine import refusals
from adaptivespec_vllm.engine.decision_log import DecisionLog
from adaptivespec_vllm.engine.learning import observe
from adaptivespec_vllm.engine.metrics.carry import TreeRunnerOutput
from adaptivespec_vllm.engine.overrides import Overrides, overrides_of
from adaptivespec_vllm.engine.target import eos_ids
from adaptivespec_vllm.engine.v1 import integrity
from adaptivespec_vllm.engine.v1.costs import Measurement, agreed, costs_of
from adaptivespec_vllm.engine.v1.faults import DraftFaults
from adaptivespec_vllm.engine.v1.proposer import TreeProposer
from adaptivespec_vllm.engine.v1.sampler import (
    TreeRejectionSampler,
    all_logits_processors,
    sample_one_row_a_request,
)
from adaptivespec_vllm.engine.v1.stats import WorkerStats
from adaptivespec_vllm.engine.v1.step import Step, match_trees
from adaptivespec_vllm.engine.v1.step_times import StepTimes
from adaptivespec_vllm.engine.v1.transfer import to_device
from adaptivespec_vllm.engine.v1.tree_attention import TreeAttentionStep, attach_trees
from adaptivespec_vllm.policy import make_policy
from adaptivespec_vllm.policy.base import Drafting, NoDrafting
from adaptivespec_vllm.policy.costs import Costs
from adaptivespec_vllm.policy.guard import allowance
from adaptivespec_vllm.policy.recording import Recorded
from adaptivespec_vllm.rules import make_rule
from adaptivespec_vllm.types import NOTHING_DRAFTED, DraftTree, StepFeedback, TreeShape, TreeTokens, VerifyResult
from adaptivespec_vllm.verify import RequestMargin

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger("vllm.adaptivespec")  # below vLLM's own, so that it is shown


class TreeModelRunner:
    """Mixed into a model runner of vLLM, before it."""

    stock_attention: tuple[type, ...]
    """vLLM's attention implementations on this platform that can learn trees."""

    attention: TreeAttention
    """Computes the tree rows of a forward pass."""

    attention_name: str
    """The same for people."""

    measurement: type[Measurement] = Measurement
    """Measures what a step costs."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        with all_logits_processors():
            super().__init__(vllm_config, device)
        self.decision_log = DecisionLog.from_environment() if self.parallel_config.rank == 0 else None
        self.costs: Costs | None = None
        """What a step costs here, as measured at start; a file in the configuration wins over it."""
        self.configure(vllm_config.speculative_config.adaptivespec)
        self.faults = DraftFaults(self.parallel_config.world_size)
        self.drafter = self.make_drafter(vllm_config, device)
        self.rejection_sampler = TreeRejectionSampler(self)
        self.stats = WorkerStats()
        """Counts of this step; they leave with its output."""
        self.totals = WorkerStats()
        self.promoted: Counter[str] = Counter()
        """Promoted tokens by request, since it began."""
        self.step: Step | None = None
        self.drafting: Drafting | None = None
        """The policy's view of the step's trees, from the first pass of the head on; None where drafting failed."""
        self.pending: dict[str, DraftTree] = {}
        """Trees handed to the scheduler, by request, until it schedules them."""
        self._attention_steps: list[TreeAttentionStep] = []
        self.checks = integrity.wanted()
        self._records_requests = self.observability_config.per_request_spec_decode_metrics != "none"

    def configure(self, settings: AdaptiveSpecConfig) -> None:
        """Use these settings from the next step on. Their cap must be the one that the scheduler knows."""
        self.settings = settings
        self._overrides: dict[str, Overrides] = {}
        self.policy = make_policy(settings, self.costs if settings.tree.costs is None else None)
        self._step_times = StepTimes()
        if self.decision_log is not None:
            self.policy = Recorded(self.policy, self.decision_log.write)
        self.max_width = settings.max_width
        self.rule = make_rule(settings)

    # --- start -------------------------------------------------------------------------------------------------

    def make_drafter(self, vllm_config: VllmConfig, device: torch.device) -> TreeProposer:
        """The proposer of this platform."""
        raise NotImplementedError

    def teach_attention(self) -> None:
        """Put tree rows into the loaded attention layers, and say how they are computed."""
        raise NotImplementedError

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load target and head, and teach their attention trees."""
        super().load_model(load_dummy_weights)
        refusals.check_layers(self.attention_layers(), self.model_config.dtype)
        self.teach_attention()

    def describe_attention(self) -> str:
        """Which kernels attend which rows, for people."""
        raise NotImplementedError

    def attention_layers(self) -> dict[str, Any]:
        """vLLM's attention layers of target and head that keep a KV cache, by name."""
        layers = self.compilation_config.static_forward_context
        return {
            name: layer
            for name, layer in layers.items()
            if isinstance(getattr(layer, "impl", None), self.stock_attention)
        }

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; from here on there is a batch."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        sample_one_row_a_request(self.input_batch.thinking_budget_state_holder)

    def measure_costs(self) -> None:
        """Tell a policy that asks what a step costs, unless the configuration does."""
        if self.policy.costs is not None and self.settings.tree.costs is None:
            self.policy.costs = self.costs = costs_of(self)

    def _decides_by_measured_costs(self) -> bool:
        return self.costs is not None and self.policy.costs is not None and self.settings.tree.costs is None

    # --- a step, in order ----------------------------------------------------------------------------------------

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self.pending.pop(req_id, None)
        self.drafter.backlog.forget(req_id)
        self.policy.forget(req_id)
        self.promoted.pop(req_id, None)
        self._overrides.pop(req_id, None)

    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> Any:
        """A step's forward pass; the step's trees live from here to the end of ``sample_tokens``."""
        self.step = None
        self._attention_steps = []
        self._learn_costs(scheduler_output)
        with self.stats.timed("execute"):
            return super().execute_model(scheduler_output, intermediate_tensors)

    def _learn_costs(self, scheduler_output: SchedulerOutput) -> None:
        residuals = self._step_times.begin(scheduler_output.num_scheduled_tokens)
        if residuals is not None and self._decides_by_measured_costs():
            residuals = agreed(residuals)
            self.policy.costs = self.costs.corrected(residuals.plain, residuals.drafting)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        with self.stats.timed("execute/prepare"):
            num_reqs, rows = self.input_batch.num_reqs, int(num_scheduled_tokens.sum())
            self.step = step = match_trees(
                self.pending,
                self.input_batch.req_ids,
                scheduler_output.scheduled_spec_decode_tokens,
                self.input_batch.num_computed_tokens_cpu[:num_reqs],
                num_scheduled_tokens,
                self.input_ids.cpu[:rows].numpy(),
            )
            self.stats.chains.update(step.lost)
            step.slots = [table.slot_mapping.gpu[:rows].clone() for table in self.input_batch.block_table.block_tables]
            if step.has_trees:
                self._place_trees(step)
        return prepared

    def _place_trees(self, step: Step) -> None:
        """Positions by depth, and no slots for draft rows. Only after vLLM derived slots from positions."""
        rows, nodes = step.draft_rows()
        places = to_device(rows, self.device)
        self.positions.index_copy_(0, places, to_device(step.batch.positions.numpy()[nodes], self.device))
        for table in self.input_batch.block_table.block_tables:
            table.slot_mapping.gpu.index_fill_(0, places, -1)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if self.step is not None and self.step.has_trees:
            with self.stats.timed("execute/prepare"):
                self._attention_steps = attach_trees(
                    self.step, self.attn_groups, metadata, common, self.attention, self.device
                )
        return metadata, common

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.stats.timed("execute/target"):
            output = super()._model_forward(*args, **kwargs)
        self.stats.seconds["execute/target/attention"] += sum(a.seconds for a in self._attention_steps)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Verification, commit, bookkeeping and drafting."""
        with self.stats.timed("sample"):
            try:
                output = super().sample_tokens(grammar_output)
                if self.step is not None and all(self.step.deferred) and self._did_as_modelled():
                    requests, rows = len(self.step.trees), self.step.num_rows
                    expected = self.costs.target(rows) + self.drafting.seconds
                    self._step_times.end(requests, rows, expected, any(self.drafts))
            finally:
                self.step = None
        return self._with_counts(output)

    def _did_as_modelled(self) -> bool:
        """Whether costs say what this step should have taken: a request may not want what the policy chose."""
        drafting = self.drafting
        return self._decides_by_measured_costs() and drafting is not None and drafting.drafts == self.drafts

    def _with_counts(self, output: Any) -> Any:
        """A step's output with what was counted in it."""
        counted, self.stats = self.stats, WorkerStats()
        self.totals.add(counted)
        if self.checks:
            integrity.check_integrity(self)
        promoted = {
            req_id: (self.promoted[req_id], self.policy.signal(req_id).regret)
            for req_id in self.input_batch.req_ids
            if self._records_requests and req_id in self.promoted
        }
        return TreeRunnerOutput.of(output, counted, promoted)

    def _update_states_after_model_execute(
        self, output_token_ids: torch.Tensor, scheduler_output: SchedulerOutput
    ) -> None:
        super()._update_states_after_model_execute(output_token_ids, scheduler_output)
        if self.step is None or self.step.result is None:
            return
        if self.checks:
            integrity.check_integrity(self)
        with self.stats.timed("commit"):
            self._commit(self.step)
        with self.faults.tolerated("learning from drafts"):
            self._learn(self.step)

    def _commit(self, step: Step) -> None:
        """Write the keys and values of accepted draft rows, and of no others, to the cache."""
        if not self._attention_steps:
            return
        for attention, gid in zip(self._attention_steps, self._group_ids(), strict=True):
            if step.plan.rows.size:
                self.commit_rows(step, attention.trees.fresh, step.slots[gid])
            attention.trees.fresh.clear()

    def commit_rows(
        self, step: Step, fresh: Mapping[str, tuple[torch.Tensor, torch.Tensor]], slots: torch.Tensor
    ) -> None:
        """The same in some layers, by vLLM's own cache update.

        Args:
            step: its result is known.
            fresh: by layer, keys and values of the tree rows.
            slots: ``int64``, the sequential slots of all batch rows.

        """
        places = step.fresh_rows()[step.plan.rows]
        is_tree_row = places >= 0
        kept = to_device(places[is_tree_row], self.device)
        slots = slots[to_device(step.plan.targets[is_tree_row], self.device)]
        for name, (key, value) in fresh.items() if len(kept) else ():
            layer = self.compilation_config.static_forward_context[name]
            layer.impl.do_kv_cache_update(layer, key[kept], value[kept], layer.kv_cache, slots)

    def _group_ids(self) -> list[int]:
        return [gid for gid, groups in enumerate(self.attn_groups) for _ in groups]

    def _learn(self, step: Step) -> None:
        """Tell the policy what became of each tree."""
        result = step.result
        assert result is not None
        columns = zip(result.lengths.tolist(), result.promotions.tolist(), result.regrets.tolist(), strict=True)
        stats = self.stats
        stats.engine_steps += 1
        stats.plain_engine_steps += not any(map(len, step.trees))
        sampled = self.sampled_requests()
        feedbacks: dict[str, StepFeedback] = {}
        for b, (accepted, promotions, regret) in enumerate(columns):
            if not sampled[b]:
                continue
            req_id, tree = self.input_batch.req_ids[b], step.trees[b]
            depth = stats.record(tree, accepted, promotions, regret)
            if promotions:
                self.promoted[req_id] += promotions
            feedbacks[req_id] = (
                StepFeedback(
                    tree.confidence,
                    depth,
                    len(tree),
                    accepted,
                    promotions,
                    regret,
                    tree.verdicts(result.paths[b, :accepted].tolist()),
                )
                if step.drafted[b] and len(tree)
                else NOTHING_DRAFTED
            )
        with stats.timed("learn"):
            observe(self.policy, feedbacks, lambda req_id: self.overrides(req_id).margin, self.settings, stats)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM rewinds the noise of partly prefilled requests by an offset that generators on the CPU do not have. Ours
        # used none (see TreeRejectionSampler), so there is nothing to rewind.
        generators = self.input_batch.generators
        idle = {b: generators.pop(b) for b, s in enumerate(self.sampled_requests()) if not s and b in generators}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(idle)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # vLLM's check looks at the longest request and turns drafting off for all; TreeProposer fits each tree.
        return common_attn_metadata is not None

    # --- what proposer and sampler ask for ------------------------------------------------------------------------

    def verify(self, logits: torch.Tensor, margins: Sequence[RequestMargin | None]) -> VerifyResult:
        """Walk the step's trees with the target's arg-max; the result is on the host."""
        raise NotImplementedError

    def sampled_requests(self) -> list[bool]:
        """Which requests of the batch emit tokens in this step (the others are partly prefilled)."""
        return (~self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()

    def margins(self) -> list[RequestMargin | None]:
        """The lossy rule of each request in this step."""
        assert self.step is not None
        return [
            self._margin(req_id) if drafted and len(tree) else None
            for req_id, tree, drafted in zip(self.input_batch.req_ids, self.step.trees, self.step.drafted, strict=True)
        ]

    def _margin(self, req_id: str) -> RequestMargin | None:
        margin = self.overrides(req_id).margin
        if margin is None:
            return None
        allowed = allowance(margin, self.settings.guard, self.policy.signal(req_id))
        if allowed.max_log_ratio is None:
            return None
        params = self.requests[req_id].sampling_params
        assert params is not None
        if self.rule is not None and self.rule.window and params.thinking_token_budget is not None:
            return None  # vLLM counts a token of the budget when it is drawn, and a window is drawn before it stands
        return RequestMargin(
            max_log_ratio=allowed.max_log_ratio,
            max_promotions=allowed.max_promotions,
            max_regret=allowed.max_regret,
            protected=tuple(params.all_stop_token_ids | eos_ids(self.model_config.hf_config.eos_token_id)),
            lookahead=margin.looks_ahead,
        )

    def accepted_rows(self) -> torch.Tensor:
        """``int64 [rows]``: for each row of the batch, the row whose token takes its place in the sequence."""
        step = self.step
        assert step is not None
        rows = np.arange(step.num_rows)
        rows[step.plan.targets] = step.plan.rows
        return to_device(rows, self.device)

    def overrides(self, req_id: str) -> Overrides:
        """What the request changes for itself; the front end has refused whatever is not allowed."""
        if req_id not in self._overrides:
            params = self.requests[req_id].sampling_params
            assert params is not None
            self._overrides[req_id] = overrides_of(params.extra_args, self.settings)
        return self._overrides[req_id]

    def begin_drafting(self, rows: Sequence[int]) -> list[bool]:
        """Which requests draft, given the rows that each one takes in the head's first pass."""
        requests, decoding = self.input_batch.req_ids, self.sampled_requests()
        wanted = [self.overrides(req_id).drafts for req_id in requests]
        plain = not any(wanted) or (
            self._decides_by_measured_costs() and all(decoding) and self._step_times.leaves_out(len(requests))
        )
        self.drafting = NoDrafting([False] * len(requests)) if plain else self.policy.begin(requests, decoding, rows)
        self.drafts = [drafts and wants for drafts, wants in zip(self.drafting.drafts, wanted, strict=True)]
        return self.drafts

    def bounds(self, confidences: Sequence[float]) -> list[TreeShape]:
        """The largest tree of each request."""
        shapes = zip(self.input_batch.req_ids, self.drafting.bounds(confidences), strict=True)
        return [self.overrides(req_id).bound(shape) for req_id, shape in shapes]

    def keep_trees(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        """Keep the trees just drafted until the scheduler sends their tokens back; what it is to get of each."""
        req_ids = self.input_batch.req_ids
        self.pending.update(zip(req_ids, trees, strict=True))
        return [
            TreeTokens(tree.tokens, tree.parents) if self._has_grammar(req_id) else tree.tokens
            for req_id, tree in zip(req_ids, trees, strict=True)
        ]

    def _has_grammar(self, req_id: str) -> bool:
        params = self.requests[req_id].sampling_params
        return params is not None and params.structured_outputs is not None
