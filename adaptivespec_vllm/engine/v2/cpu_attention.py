"""Trees attached to the attention metadata of a V2 step, for vLLM's CPU attention."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from adaptivespec_vllm.attention import TreeAttention, TreePlaces, TreeRows
from adaptivespec_vllm.engine.v1.first_pass import metadata_of
from adaptivespec_vllm.engine.v1.tree_attention import TreeAttentionStep
from adaptivespec_vllm.engine.v2.step import TreeStep


def attach_trees(
    step: TreeStep,
    input_batch: Any,
    attn_groups: Sequence[Sequence[Any]],
    metadata: dict[str, Any],
    head_layers: Set[str],
    attention: TreeAttention,
) -> list[tuple[int, TreeAttentionStep]]:
    """Make the target's layers attend the trees of a step; those of the head keep vLLM's own metadata.

    Args:
        step: its draft rows have been placed.
        input_batch: vLLM's batch.
        attn_groups: vLLM's groups of attention layers, by KV cache group.
        metadata: vLLM's attention metadata by layer; entries of the target's layers are replaced.
        head_layers: names of the head's layers.
        attention: computes the tree rows.

    Returns:
        What was attached, with its KV cache group.

    """
    places = _Places.of(step, input_batch)
    attached = []
    for gid, groups in enumerate(attn_groups):
        for group in groups:
            stock = metadata[group.layer_names[0]]
            where = TreePlaces(
                block_table=stock.block_table[places.requests],
                prefix_lens=step.batch.positions[step.batch.start[:-1].long()].int()[places.requests],
                query_start=places.start,
                key_start=places.start,
                ancestors=step.batch.ancestors[places.of_logits],
                prefixes=places.prefixes,
                queries=places.sizes,
                keys=places.sizes,
            )
            of_group = TreeAttentionStep(TreeRows(None if places.rest is None else places.rows, where, attention))
            if places.rest is not None:
                of_group.rest_rows = places.rest
                of_group.rest_metadata = _metadata_of_rest(step, input_batch, group, gid, stock, places)
            with_trees = copy.copy(stock)
            with_trees.adaptivespec = of_group
            metadata.update({name: with_trees for name in group.layer_names if name not in head_layers})
            attached.append((gid, of_group))
    return attached


class _Places:
    """Which rows are tree rows, known on the host.

    Attributes:
        requests: ``int64 [G]``, requests whose rows are tree rows; ``others`` are all the rest.
        start: ``int32 [G + 1]``, first tree row of each.
        rows: ``int64``, batch rows that are tree rows.
        rest: all other rows of the batch; None where there are none.
        of_logits: ``int64``, tree rows among the rows that get logits.
        sizes: tree rows of each, on the host.
        prefixes: tokens of each in the cache, on the host; at most so many, where a step before is not known yet.

    """

    def __init__(self, is_tree: np.ndarray, rows: np.ndarray, logits: np.ndarray, ends: np.ndarray) -> None:
        self.sizes = logits[is_tree].tolist()
        self.prefixes = (ends - logits)[is_tree].tolist()
        self.requests = torch.from_numpy(is_tree.nonzero()[0])
        self.others = (~is_tree).nonzero()[0].tolist()
        self.start = torch.from_numpy(np.concatenate([[0], np.cumsum(logits[is_tree])]).astype(np.int32))
        of_trees = np.repeat(is_tree, rows)
        self.rows = torch.from_numpy(of_trees.nonzero()[0])
        self.rest = None if is_tree.all() else torch.from_numpy((~of_trees).nonzero()[0])
        self.of_logits = torch.from_numpy(np.repeat(is_tree, logits).nonzero()[0])
        self.rest_lengths = rows[~is_tree].tolist()

    @classmethod
    def of(cls, step: TreeStep, input_batch: Any) -> _Places:
        rows = np.diff(input_batch.query_start_loc_np[: input_batch.num_reqs + 1])
        ends = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].numpy()
        return cls(step.is_tree, rows, np.diff(input_batch.cu_num_logits_np), ends)


def _metadata_of_rest(
    step: TreeStep, input_batch: Any, group: Any, gid: int, stock: Any, places: _Places
) -> Mapping[str, Any]:
    assert step.sequential_slots is not None
    assert places.rest is not None
    seq_lens = input_batch.seq_lens[: input_batch.num_reqs]
    common = CommonAttentionMetadata(
        query_start_loc=stock.query_start_loc,
        query_start_loc_cpu=stock.query_start_loc,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=input_batch.num_reqs,
        num_actual_tokens=stock.num_actual_tokens,
        max_query_len=stock.max_query_len,
        max_seq_len=stock.max_seq_len,
        block_table_tensor=stock.block_table,
        slot_mapping=stock.slot_mapping,
        causal=True,
    )
    slots = step.sequential_slots[gid][places.rest]
    builder = group.get_metadata_builder(0)
    return builder.build(0, metadata_of(common, places.others, places.rest_lengths, stock.block_table, slots))
