"""Drafting on the V1 runner, on any device: vLLM's EAGLE proposer, with trees behind its first pass.

Numbers that decide anything are on the host already when they are needed; nothing here waits for a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from adaptivespec_vllm.engine.v1.first_pass import Backlog, Rows, metadata_of, slots_of
from adaptivespec_vllm.engine.v1.transfer import to_device
from adaptivespec_vllm.types import NO_TREE, DraftTree, TreeShape

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v1.runner import TreeModelRunner


class TreeProposer(EagleProposer):
    """Drafts one tree a request.

    The first pass over the accepted tokens keeps the head's KV made of the target's true hidden states: it is vLLM's
    own, unless a platform has a leaner one. The levels below it are ours, each platform's its own.
    """

    runner: TreeModelRunner

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: TreeModelRunner) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.window = self.draft_model_config.max_model_len
        """Positions that the head can tell apart."""
        self.head: Any = None
        """The loaded model as drafting sees it, made by :meth:`make_head`."""
        self.backlog = Backlog(self.max_num_tokens // 2)
        self._chosen: list[int] = []
        """Requests of the last first pass, in its order."""
        self._first_pass: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sampled_rows = torch.empty(0)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the head, and keep what its passes return."""
        super().load_model(target_model)
        share_unadapted_layers(self.model)
        self.model.register_forward_hook(self._keep_output)
        self.adopt_weights()

    def adopt_weights(self) -> None:
        """Make the head anew of the model's weights as they are now: it packs a copy of them."""
        self.head = self.make_head()

    def make_head(self) -> Any:
        """The head of this platform."""
        raise NotImplementedError

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
        roots = common.seq_lens_cpu_upper_bound.tolist()  # exact: rejected tokens are no longer counted
        with self.runner.faults.tolerated("drafting"):
            with stats.timed("draft/first"):
                self._run_first_pass(roots, **kwargs)
            with stats.timed("draft/levels"):
                return self._draft(roots, common.block_table_tensor)
        self.runner.drafting = None
        self.runner.keep_trees([DraftTree([], [], root) for root in roots])
        return [[] for _ in roots]

    def _run_first_pass(self, roots: list[int], **kwargs: Any) -> None:
        """vLLM's first pass over the requests that need it; the rows of the others are put off."""
        common: CommonAttentionMetadata = kwargs["common_attn_metadata"]
        requests = self.runner.input_batch.req_ids
        rows = Rows(kwargs["target_token_ids"], kwargs["target_positions"], kwargs["target_hidden_states"])
        starts = common.query_start_loc_cpu.tolist()
        spans = list(itertools.pairwise(starts))
        positions = [root - (end - first) for root, (first, end) in zip(roots, spans, strict=True)]
        waiting = [self.backlog.waiting(request, at) for request, at in zip(requests, positions, strict=True)]
        lengths = [end - first + more for (first, end), more in zip(spans, waiting, strict=True)]
        self._chosen = self._choose(lengths, self.runner.begin_drafting(lengths))

        if len(self._chosen) < len(requests):
            others = sorted(set(range(len(requests))).difference(self._chosen))
            for b, copy in zip(others, rows.copies([spans[b] for b in others]), strict=True):
                self.backlog.put(requests[b], copy, roots[b])
        elif not any(waiting):
            self._pass(rows, kwargs)
            return
        if not self._chosen:
            return
        whole = [Rows.joined([*self.backlog.take(requests[b]), rows.part(*spans[b])]) for b in self._chosen]
        block_size = self.runner.input_batch.block_table.block_tables[self.kv_cache_gid].block_size
        table = common.block_table_tensor
        slots = [slots_of(part.positions, table[b], block_size) for b, part in zip(self._chosen, whole, strict=True)]
        lengths = [len(part) for part in whole]
        kwargs |= {
            "next_token_ids": kwargs["next_token_ids"][to_device(self._chosen, self.device)],
            "common_attn_metadata": metadata_of(common, self._chosen, lengths, table, torch.cat(slots)),
        }
        self._pass(Rows.joined(whole), kwargs)

    def _pass(self, rows: Rows, kwargs: dict[str, Any]) -> None:
        """vLLM's first pass over these rows."""
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
        rows, device = len(hidden), self.device
        start = torch.arange(rows + 1, dtype=torch.int32)
        lengths = torch.full((rows,), context + 1, dtype=torch.int32)
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        common = CommonAttentionMetadata(
            query_start_loc=to_device(start, device),
            query_start_loc_cpu=start,
            seq_lens=to_device(lengths, device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=rows,
            num_actual_tokens=rows,
            max_query_len=1,
            max_seq_len=context + 1,
            block_table_tensor=torch.zeros(rows, context + 1, dtype=torch.int32, device=device),
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
        raise NotImplementedError

    def _shapes(self, confidences: Sequence[float], requests: Sequence[int], roots: Sequence[int]) -> list[TreeShape]:
        """The largest tree of each request of the batch, given the draft's confidence at each root."""
        growing = set(requests)
        return [
            self._fit(shape, root) if b in growing else NO_TREE
            for b, (shape, root) in enumerate(zip(self.runner.bounds(confidences), roots, strict=True))
        ]

    def _fit(self, shape: TreeShape, root_position: int) -> TreeShape:
        """The shape made smaller where the sequence or the head's window ends.

        A step on a root at position P emits up to depth + 1 tokens, and its nodes occupy slots up to P + nodes. The
        head runs over nodes of all levels but the last, at positions P .. P + depth - 2.
        """
        room = self.max_model_len - root_position - 2
        depth = min(shape.depth, room, self.window + 1 - root_position)
        nodes = min(shape.nodes, room)
        return TreeShape(depth, shape.width, nodes) if depth > 0 and nodes > 0 else NO_TREE


def share_unadapted_layers(head: Any) -> None:
    """Layers that a head shares with the target may be wrapped for adapters; the head takes what is inside."""
    for owner, name in ((head.model, "embed_tokens"), (head, "lm_head")):
        layer = getattr(owner, name, None)
        if isinstance(layer, BaseLayerWithLoRA):
            setattr(owner, name, layer.base_layer)
