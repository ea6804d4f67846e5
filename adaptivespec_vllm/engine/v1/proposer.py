"""Drafting on the V1 runner: vLLM's EAGLE proposer, with trees behind its first pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import expand_trees, scratch_rows_needed
from adaptivespec_vllm.engine.v1.head import Eagle3Head
from adaptivespec_vllm.types import NO_TREE, TreeShape

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v1.runner import TreeModelRunner


class TreeProposer(EagleProposer):
    """Drafts one tree a request.

    The first pass over the accepted tokens is vLLM's own (it keeps the head's KV made of the target's true hidden
    states); the levels below it are ours.
    """

    runner: TreeModelRunner

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: TreeModelRunner) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.window = self.draft_model_config.max_model_len
        """Positions that the head can tell apart."""
        self.head: Eagle3Head | None = None
        self._first_pass: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sampled_rows = torch.empty(0)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the head, and keep what its passes return."""
        super().load_model(target_model)
        self.model.register_forward_hook(self._keep_output)

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

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> list[list[int]]:  # type: ignore[override]
        """Draft the trees of the batch and hand their tokens to the scheduler, best nodes first."""
        stats = self.runner.stats
        with stats.timed("draft/first"):
            # Zero tokens ask for the first pass only; the attribute it leaves behind sizes vLLM's dummy runs.
            super().propose(0, *args, **kwargs)
            self.num_speculative_tokens = num_speculative_tokens
        with stats.timed("draft/levels"):
            trees = self._draft(kwargs["target_positions"], kwargs["common_attn_metadata"])
        return trees

    def _draft(self, target_positions: torch.Tensor, metadata: CommonAttentionMetadata) -> list[list[int]]:
        assert self._first_pass is not None
        rows = self._sampled_rows
        last_hidden, hidden = (t[rows] for t in self._first_pass)
        root_positions = (target_positions[rows] + 1).to(torch.int32)
        if self.head is None:
            self.head = Eagle3Head(self.model)
        log_probs, ids = ops.topk_logprobs(self.head.logits(last_hidden), self.runner.max_width)
        roots = root_positions.tolist()
        shapes = self.runner.choose_shapes(np.exp(log_probs[:, 0].numpy()).tolist())
        shapes = [self._fit(shape, root) for shape, root in zip(shapes, roots, strict=True)]
        if any(shape.nodes for shape in shapes):
            self.head.begin(hidden, root_positions, metadata.block_table_tensor, scratch_rows_needed(shapes))
        forward = self.head.seconds
        trees = expand_trees(
            self.head,
            log_probs,
            self.head.to_target(ids),
            shapes,
            roots,
            self.runner.drafting,
        )
        self.runner.stats.seconds["draft/levels/forward"] += self.head.seconds - forward
        self.runner.keep_trees(trees)
        return [tree.tokens for tree in trees]

    def _fit(self, shape: TreeShape, root_position: int) -> TreeShape:
        """The shape made smaller where the sequence or the head's window ends.

        A step on a root at position P emits up to depth + 1 tokens, and its nodes occupy slots up to P + nodes. The
        head runs over nodes of all levels but the last, at positions P .. P + depth - 2.
        """
        room = self.max_model_len - root_position - 2
        depth = min(shape.depth, room, self.window + 1 - root_position)
        nodes = min(shape.nodes, room)
        return TreeShape(depth, shape.width, nodes) if depth > 0 and nodes > 0 else NO_TREE
