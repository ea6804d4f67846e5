"""Drafting on the V1 runner: vLLM's EAGLE proposer, with trees behind its first pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import expand_trees, scratch_rows_needed
from adaptivespec_vllm.engine.v1.first_pass import Backlog, Rows, metadata_of, slots_of
from adaptivespec_vllm.engine.v1.head import Eagle3Head
from adaptivespec_vllm.types import NO_TREE, DraftTree, TreeShape

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v1.runner import TreeModelRunner


class TreeProposer(EagleProposer):
    """Drafts one tree a request.

    The first pass over the accepted tokens keeps the head's KV made of the target's true hidden states: it is vLLM's
    own, or the same on packed weights. The levels below it are ours.
    """

    runner: TreeModelRunner

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: TreeModelRunner) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.window = self.draft_model_config.max_model_len
        """Positions that the head can tell apart."""
        self.head: Eagle3Head | None = None
        """Made of the loaded model."""
        self.backlog = Backlog(self.max_num_tokens // 2)
        self._chosen: list[int] = []
        """Requests of the last first pass, in its order."""
        self._first_pass: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sampled_rows = torch.empty(0)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the head, and keep what its passes return."""
        super().load_model(target_model)
        self._share_unadapted_layers()
        self.model.register_forward_hook(self._keep_output)
        self.adopt_weights()

    def _share_unadapted_layers(self) -> None:
        """Layers that the head shares with the target may be wrapped for adapters; the head takes what is inside."""
        for owner, name in ((self.model.model, "embed_tokens"), (self.model, "lm_head")):
            layer = getattr(owner, name, None)
            if isinstance(layer, BaseLayerWithLoRA):
                setattr(owner, name, layer.base_layer)

    def adopt_weights(self) -> None:
        """Make the head anew of the model's weights as they are now: it packs a copy of them."""
        self.head = Eagle3Head(self.model)

    def _keep_output(self, module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._first_pass = output

    def _set_positions(self, num_tokens: int, positions: torch.Tensor) -> None:
        """Rows beyond the head's window get its last position: they are never drafted from, and must not crash."""
        super()._set_positions(num_tokens, positions.clamp(max=self.window - 1))

    def prepare_inputs(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        sampled_token_ids: list[list[int]],
        num_draft_tokens: list[int],
    ) -> tuple[CommonAttentionMetadata, torch.Tensor]:
        """Rows of the accepted path instead of the first rows, with the slots of a sequence."""
        metadata, rows = super().prepare_inputs(common_attn_metadata, sampled_token_ids, num_draft_tokens)
        slots = self.runner.step.slots[self.kv_cache_gid]
        metadata.slot_mapping = slots[rows]
        return metadata, self.runner.accepted_rows()[rows]

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        """Remember which rows are drafted from."""
        num_tokens, self._sampled_rows, metadata = super().set_inputs_first_pass(*args, **kwargs)
        return num_tokens, self._sampled_rows, metadata

    def propose(self, num_speculative_tokens: int, **kwargs: Any) -> list[list[int]]:  # type: ignore[override]
        """Draft the trees of the batch and hand their tokens to the scheduler, best nodes first."""
        stats = self.runner.stats
        common: CommonAttentionMetadata = kwargs["common_attn_metadata"]
        roots = (kwargs["target_positions"][common.query_start_loc_cpu[1:].long() - 1] + 1).tolist()
        with self.runner.faults.tolerated("drafting"):
            with stats.timed("draft/first"):
                self._run_first_pass(**kwargs)
            with stats.timed("draft/levels"):
                return self._draft(roots, common.block_table_tensor)
        self.runner.drafting = None
        self.runner.keep_trees([DraftTree([], [], root) for root in roots])
        return [[] for _ in roots]

    def _run_first_pass(self, **kwargs: Any) -> None:
        """vLLM's first pass over the requests that need it; the rows of the others are put off."""
        common: CommonAttentionMetadata = kwargs["common_attn_metadata"]
        requests = self.runner.input_batch.req_ids
        rows = Rows(kwargs["target_token_ids"], kwargs["target_positions"], kwargs["target_hidden_states"])
        starts = common.query_start_loc_cpu.tolist()
        own = [rows.part(first, end) for first, end in itertools.pairwise(starts)]
        positions = rows.positions[common.query_start_loc_cpu[:-1].long()].tolist()
        waiting = [self.backlog.waiting(request, at) for request, at in zip(requests, positions, strict=True)]
        lengths = [len(part) + more for part, more in zip(own, waiting, strict=True)]
        self._chosen = self._choose(lengths, self.runner.begin_drafting(lengths))

        if len(self._chosen) < len(requests):
            for b in set(range(len(requests))).difference(self._chosen):
                self.backlog.put(requests[b], own[b])
        elif not any(waiting):
            self._pass(rows, kwargs)
            return
        if not self._chosen:
            return
        whole = [Rows.joined([*self.backlog.take(requests[b]), own[b]]) for b in self._chosen]
        block_size = self.runner.input_batch.block_table.block_tables[self.kv_cache_gid].block_size
        table = common.block_table_tensor
        slots = [slots_of(part.positions, table[b], block_size) for b, part in zip(self._chosen, whole, strict=True)]
        chosen = torch.tensor(self._chosen)
        kwargs |= {
            "next_token_ids": kwargs["next_token_ids"][chosen],
            "common_attn_metadata": metadata_of(common, chosen, [len(part) for part in whole], table, torch.cat(slots)),
        }
        self._pass(Rows.joined(whole), kwargs)

    def _pass(self, rows: Rows, kwargs: dict[str, Any]) -> None:
        """The first pass over these rows: vLLM's own, or a lean one where the head has it."""
        common: CommonAttentionMetadata = kwargs["common_attn_metadata"]
        assert self.head is not None
        if self.head.takes(common.max_query_len):
            start = common.query_start_loc_cpu
            self._sampled_rows = start[1:].long() - 1
            tokens = rows.tokens.roll(-1)
            tokens[self._sampled_rows] = kwargs["next_token_ids"].to(tokens.dtype)
            # vLLM pads slots of a step without drafts.
            slots = common.slot_mapping[: len(rows)]
            self._first_pass = self.head.first_pass(
                replace(rows, tokens=tokens), start, common.block_table_tensor, slots
            )
            return
        kwargs |= {
            "target_token_ids": rows.tokens,
            "target_positions": rows.positions,
            "target_hidden_states": rows.hidden,
        }
        tokens_a_step = self.num_speculative_tokens
        try:
            super().propose(0, **kwargs)  # zero tokens ask for the first pass only
        finally:
            self.num_speculative_tokens = tokens_a_step  # it sizes vLLM's dummy runs

    def run_first_pass_alone(self, hidden: torch.Tensor, context: int) -> None:
        """The first pass with a row a request behind a made-up context, for the time it takes; nothing is kept.

        Args:
            hidden: ``[R, hidden states of the auxiliary layers]``.
            context: tokens before each row.

        """
        rows = len(hidden)
        start = torch.arange(rows + 1, dtype=torch.int32)
        lengths = torch.full((rows,), context + 1, dtype=torch.int32)
        zeros = torch.zeros(rows, dtype=torch.int64)
        common = CommonAttentionMetadata(
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=rows,
            num_actual_tokens=rows,
            max_query_len=1,
            max_seq_len=context + 1,
            block_table_tensor=torch.zeros(rows, context + 1, dtype=torch.int32),
            slot_mapping=zeros - 1,
            causal=True,
        )
        made_up = {
            "next_token_ids": zeros.int(),
            "token_indices_to_sample": None,
            "common_attn_metadata": common,
            "sampling_metadata": None,
        }
        self._pass(Rows(zeros.int(), zeros + context, hidden), made_up)

    def _choose(self, lengths: Sequence[int], drafts: Sequence[bool]) -> list[int]:
        """Requests that go through the first pass: those that draft, and those whose rows are too many to put off.

        What does not fit into the pass with its backlog waits once more, and does not draft.
        """
        sampled, limit = self.runner.sampled_requests(), self.backlog.limit
        needed = [not sampled[b] or drafts[b] or lengths[b] > limit for b in range(len(lengths))]
        room = self.max_num_tokens - sum(n for n, s in zip(lengths, sampled, strict=True) if not s)
        chosen = []
        for b, length in enumerate(lengths):
            if needed[b] and (not sampled[b] or length <= room):
                chosen.append(b)
                room -= length if sampled[b] else 0
        return chosen

    def _draft(self, roots: list[int], block_table: torch.Tensor) -> list[list[int]]:
        """Draft behind the first pass.

        Args:
            roots: ``[B]`` position of each request's root.
            block_table: ``int32 [B, blocks]``.

        """
        runner = self.runner
        drafts = runner.drafts
        places = [(place, b) for place, b in enumerate(self._chosen) if drafts[b]]
        if not places:
            trees = [DraftTree([], [], root) for root in roots]
        else:
            trees = self._grow(*(list(column) for column in zip(*places, strict=True)), roots, block_table)
        return runner.keep_trees(trees)

    def _grow(
        self, places: list[int], requests: list[int], roots: list[int], block_table: torch.Tensor
    ) -> list[DraftTree]:
        """Trees of the requests that draft, which are at ``places`` of the first pass, and empty ones of the others."""
        assert self._first_pass is not None
        assert self.head is not None
        rows = self._sampled_rows[places]
        last_hidden, hidden = (t[rows] for t in self._first_pass)
        log_probs, ids = ops.topk_logprobs(self.head.logits(last_hidden), self.runner.max_width)
        tokens = self.head.to_target(ids)
        if len(requests) < len(roots):
            at = torch.tensor(requests)
            hidden, log_probs, tokens = (
                t.new_zeros(len(roots), t.shape[1]).index_copy(0, at, t) for t in (hidden, log_probs, tokens)
            )
        shapes = self.runner.bounds(np.exp(log_probs[:, 0].numpy()).tolist())
        growing = set(requests)
        shapes = [
            self._fit(shape, root) if b in growing else NO_TREE
            for b, (shape, root) in enumerate(zip(shapes, roots, strict=True))
        ]
        if any(shape.nodes for shape in shapes):
            root_positions = torch.tensor(roots, dtype=torch.int32)
            scratch_rows = scratch_rows_needed(shapes, self.runner.drafting.beam)
            self.head.begin(hidden, root_positions, block_table, scratch_rows)
        forward = self.head.seconds
        trees = expand_trees(self.head, log_probs, tokens, shapes, roots, self.runner.drafting)
        self.runner.stats.seconds["draft/levels/forward"] += self.head.seconds - forward
        return trees

    def _fit(self, shape: TreeShape, root_position: int) -> TreeShape:
        """The shape made smaller where the sequence or the head's window ends.

        A step on a root at position P emits up to depth + 1 tokens, and its nodes occupy slots up to P + nodes. The
        head runs over nodes of all levels but the last, at positions P .. P + depth - 2.
        """
        room = self.max_model_len - root_position - 2
        depth = min(shape.depth, room, self.window + 1 - root_position)
        nodes = min(shape.nodes, room)
        return TreeShape(depth, shape.width, nodes) if depth > 0 and nodes > 0 else NO_TREE
