"""Drafting on a CPU: level by level, the policy asked before each, on packed weights where the head has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import expand_trees, scratch_rows_needed
from adaptivespec_vllm.engine.v1.first_pass import Rows
from adaptivespec_vllm.engine.v1.head import Eagle3Head
from adaptivespec_vllm.engine.v1.proposer import TreeProposer
from adaptivespec_vllm.types import DraftTree


class CPUTreeProposer(TreeProposer):
    """Passes of few rows are bound by what a call costs: they leave vLLM's proposer aside where the head allows it."""

    head: Eagle3Head

    def make_head(self) -> Eagle3Head:
        """It packs a copy of the weights as they are now."""
        return Eagle3Head(self.model)

    def _pass(self, rows: Rows, kwargs: dict[str, Any]) -> None:
        """vLLM's first pass, or the same on packed weights."""
        common: CommonAttentionMetadata = kwargs["common_attn_metadata"]
        if not self.head.takes(common.max_query_len):
            super()._pass(rows, kwargs)
            return
        start = common.query_start_loc_cpu
        self._sampled_rows = start[1:].long() - 1
        tokens = rows.tokens.roll(-1)
        tokens[self._sampled_rows] = kwargs["next_token_ids"].to(tokens.dtype)
        # vLLM pads slots of a step without drafts.
        slots = common.slot_mapping[: len(rows)]
        self._first_pass = self.head.first_pass(replace(rows, tokens=tokens), start, common.block_table_tensor, slots)

    def _grow(
        self, places: list[int], requests: list[int], roots: list[int], block_table: torch.Tensor
    ) -> list[DraftTree]:
        """See :class:`TreeProposer`."""
        assert self._first_pass is not None
        rows = self._sampled_rows[places]
        last_hidden, hidden = (t[rows] for t in self._first_pass)
        log_probs, ids = ops.topk_logprobs(self.head.logits(last_hidden), self.runner.max_width)
        tokens = self.head.to_target(ids)
        if len(requests) < len(roots):
            at = torch.tensor(requests)
            hidden, log_probs, tokens = (
                t.new_zeros(len(roots), t.shape[1]).index_copy(0, at, t) for t in (hidden, log_probs, tokens)
            )
        shapes = self._shapes(np.exp(log_probs[:, 0].numpy()).tolist(), requests, roots)
        if any(shape.nodes for shape in shapes):
            root_positions = torch.tensor(roots, dtype=torch.int32)
            scratch_rows = scratch_rows_needed(shapes, self.runner.drafting.beam)
            self.head.begin(hidden, root_positions, block_table, scratch_rows)
        forward = self.head.seconds
        trees = expand_trees(self.head, log_probs, tokens, shapes, roots, self.runner.drafting)
        self.runner.stats.seconds["draft/levels/forward"] += self.head.seconds - forward
        return trees
