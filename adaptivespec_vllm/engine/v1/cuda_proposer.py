"""Drafting on a GPU: all levels ahead without a wait, one copy to the host, and the policy's choice there."""

from __future__ import annotations

import numpy as np
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import Ahead, RecordedHead, draft_ahead, expand_trees
from adaptivespec_vllm.engine.v1.cuda_head import CUDAHead
from adaptivespec_vllm.engine.v1.proposer import TreeProposer
from adaptivespec_vllm.engine.v1.transfer import to_device, to_host
from adaptivespec_vllm.types import DraftTree, TreeShape


class CUDATreeProposer(TreeProposer):
    """The head's modules run as vLLM loads them, inside its graphs."""

    head: CUDAHead
    _deepest: int | None = None
    """Depth of the deepest tree of the last step; None before the first."""

    def make_head(self) -> CUDAHead:
        """It holds no copy of the weights."""
        return CUDAHead(self)

    def _grow(
        self, places: list[int], requests: list[int], roots: list[int], block_table: torch.Tensor
    ) -> list[DraftTree]:
        """See :class:`TreeProposer`."""
        assert self._first_pass is not None
        rows = self._sampled_rows.long()[to_device(places, self.device)]
        last_hidden, hidden = (t[rows] for t in self._first_pass)
        width, depth = self._size_ahead(len(requests))
        log_probs, ids = ops.topk_logprobs(self.head.logits(last_hidden), width)
        tables = block_table[to_device(requests, self.device)]
        self.head.begin(hidden, [roots[b] for b in requests], tables, width, depth)
        ahead = Ahead(*to_host(*draft_ahead(self.head, log_probs, self.head.to_target(ids), depth).tensors()))

        at = torch.tensor(requests)
        log_probs, tokens = (
            t.new_zeros(len(roots), width).index_copy(0, at, t) for t in (ahead.log_probs, ahead.tokens)
        )
        confidences = np.exp(log_probs[:, 0].numpy()).tolist()
        shapes = [
            TreeShape(min(shape.depth, depth), min(shape.width, width), shape.nodes)
            for shape in self._shapes(confidences, requests, roots)
        ]
        recorded = RecordedHead(ahead, requests)
        trees = expand_trees(recorded, log_probs, tokens, shapes, roots, self.runner.drafting, recorded.expandable)
        self._deepest = max((max(tree.depths(), default=0) for tree in trees), default=0)
        return trees

    def _size_ahead(self, trees: int) -> tuple[int, int]:
        """Width and depth that are drafted ahead: one level more than the deepest tree of the last step.

        What a level costs is spent before the policy can say that it is not worth it, so depth follows what was kept.
        """
        settings = self.runner.settings
        depth = settings.max_depth if self._deepest is None else min(settings.max_depth, self._deepest + 1)
        return max(1, min(self.runner.max_width, self.max_num_tokens // trees)), max(depth, 1)
