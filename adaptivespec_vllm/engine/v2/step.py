"""One step of the V2 runner: the trees that are verified, as tensors on the device.

The scheduler never sees a token of them. It plans a number of drafts for each request, and the worker verifies as many
nodes of the tree that it drafted last for the request, which it keeps by request slot beside vLLM's draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from adaptivespec_vllm.draft import NO_TOKEN, TreeGrid
from adaptivespec_vllm.kv import rows_in_sequence
from adaptivespec_vllm.policy.base import Drafting, NoDrafting
from adaptivespec_vllm.types import MarginLimits, TreeBatch, VerifyResult


class PendingTrees:
    """The trees that were drafted last, by request slot, on the device; their tokens are in vLLM's ``draft_tokens``.

    Args:
        slots: request slots.
        nodes: draft nodes of a tree, at most.
        device: where they are.

    """

    def __init__(self, slots: int, nodes: int, device: torch.device) -> None:
        self.parents = torch.zeros(slots, nodes + 1, dtype=torch.int32, device=device)
        self.depths = torch.zeros_like(self.parents)
        self.ancestors = torch.ones(slots, nodes + 1, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(slots, nodes, device=device)

    def put(self, slots: torch.Tensor, trees: TreeGrid) -> None:
        """Keep the trees of requests ``slots [B]``."""
        self.parents[slots] = trees.parents
        self.depths[slots] = trees.depths
        self.ancestors[slots] = trees.ancestors
        self.log_probs[slots] = trees.log_probs


@dataclass
class TreeStep:
    """What a step holds; B requests, T rows that get logits (root and nodes), N rows of the batch.

    Attributes:
        requests: ids, in batch order.
        start: ``int32 [B + 1]`` on the host, first row of each tree among those with logits.
        batch: the trees, flat; row i belongs to row i of the logits.
        log_probs: ``float32 [T]``, draft log-probability of each node given its parent.
        rows: ``int64 [T]`` their places in the batch.
        root_rows: ``int64 [B]`` batch row of each root (of a prefill: its last row).
        is_tree: ``bool [B]``, on the host: the request's rows are tree rows, and only accepted ones reach the cache.
            False for prefills, whose rows go through vLLM's own causal attention.
        positions: ``int64 [N]`` sequential positions of all rows.
        sequential_slots: ``int64 [groups, N]`` cache slots of all rows, before draft rows were masked.
        slots: the same, masked.
        margins: lossy rules of the requests; None where all are strict.
        result: what the walk decided; None where the step had no drafts.
        emitting: ``bool [B]``, requests that emit tokens; once the result is known.
        drafting: the policy's view of the step that drafted the trees.

    """

    requests: list[str]
    start: np.ndarray
    batch: TreeBatch
    log_probs: torch.Tensor
    rows: torch.Tensor
    root_rows: torch.Tensor
    is_tree: np.ndarray
    positions: torch.Tensor
    sequential_slots: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    margins: MarginLimits | None = None
    result: VerifyResult | None = None
    emitting: torch.Tensor | None = None
    drafting: Drafting = field(default_factory=lambda: NoDrafting([]))

    @classmethod
    def of(cls, input_batch: Any, req_states: Any, pending: PendingTrees) -> TreeStep:
        """Match the rows of a batch, as vLLM prepared it, with the trees of its requests."""
        rows, slots = input_batch.logits_indices, input_batch.expanded_idx_mapping.long()
        place = input_batch.expanded_local_pos.long()
        node = (place - 1).clamp(min=0)
        is_root = place == 0
        roots = input_batch.positions[rows] - place
        # Until a request has sampled there is no tree: drafts that a prefill is padded with are a chain of nothing.
        padding = ~is_root & (roots < req_states.prefill_len.gpu[slots])
        drafts = req_states.draft_tokens[slots, node].masked_fill(padding, NO_TOKEN)
        parents = torch.where(padding, node, pending.parents[slots, place]).masked_fill(is_root, -1)
        depths = torch.where(padding, place, pending.depths[slots, place]).masked_fill(is_root, 0)
        batch = TreeBatch(
            start=input_batch.cu_num_logits,
            tokens=torch.where(is_root, input_batch.input_ids[rows], drafts).int(),
            parents=parents.int(),
            depths=depths.int(),
            positions=roots + depths,
            ancestors=torch.where(padding, (2 << place) - 1, pending.ancestors[slots, place]),
        )
        return cls(
            requests=input_batch.req_ids,
            start=input_batch.cu_num_logits_np,
            batch=batch,
            log_probs=pending.log_probs[slots, node],
            rows=rows,
            root_rows=rows[batch.start[:-1].long()],
            is_tree=~input_batch.is_prefilling_np,
            positions=input_batch.positions.clone(),
        )

    @property
    def num_rows(self) -> int:
        """Rows of the batch, with vLLM's padding."""
        return len(self.positions)

    def place(self, input_batch: Any, slot_mappings: torch.Tensor) -> None:
        """Positions by depth, and no cache slots for draft nodes; after vLLM derived slots from positions.

        Args:
            input_batch: its positions are written in place.
            slot_mappings: ``int64 [groups, N]``, written in place.

        """
        self.sequential_slots = slot_mappings.clone()
        input_batch.positions[self.rows] = self.batch.positions
        of_trees = torch.from_numpy(np.repeat(self.is_tree, np.diff(self.start)))
        drafted = (self.batch.parents >= 0) & of_trees.to(self.rows.device, non_blocking=True)
        self.slots = slot_mappings
        slot_mappings[:, self.rows] = slot_mappings[:, self.rows].masked_fill(drafted, -1)

    @cached_property
    def sequence(self) -> torch.Tensor:
        """``int64 [N]``: for each row of the batch, the row whose token takes its place in the sequence."""
        if self.result is None:
            return torch.arange(self.num_rows, device=self.rows.device)
        return rows_in_sequence(self.result, self.root_rows, self.num_rows)
