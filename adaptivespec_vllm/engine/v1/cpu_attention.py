"""vLLM's CPU attention with tree rows.

A layer's attention implementation is replaced by ``TreeCPUAttentionImpl`` after the model is loaded. As long as the
metadata of a forward pass carries no trees it is vLLM's own implementation, call for call.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as vllm_ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from adaptivespec_vllm.attention import LayoutError, PagedLayout, TreeRows, probe_layout
from adaptivespec_vllm.engine.v1.first_pass import metadata_of
from adaptivespec_vllm.engine.v1.step import Step

FALLBACK_ISA = "vec"
"""The kernel family whose layout is a matter of strides on every x86-64 machine."""


@dataclass(slots=True)
class TreeAttentionStep:
    """Attached to the metadata of a forward pass that holds trees.

    Attributes:
        trees: the tree rows.
        rest_rows: ``int64``, all other rows (prefills); ``None`` when there are none.
        rest_metadata: vLLM's metadata of those rows alone.
        seconds: time spent on tree rows, summed over layers.

    """

    trees: TreeRows
    rest_rows: torch.Tensor | None = None
    rest_metadata: CPUAttentionMetadata | None = None
    seconds: float = 0.0


def attach_trees(
    step: Step, attn_groups: Sequence[Sequence[Any]], metadata: Mapping[str, Any], common: Any
) -> list[TreeAttentionStep]:
    """Make the target's forward pass attend the trees of a step.

    Args:
        step: has trees.
        attn_groups: vLLM's groups of attention layers, by KV cache group.
        metadata: vLLM's attention metadata by layer.
        common: its common metadata of the batch.

    Returns:
        What was attached, one a group, in their order.

    """
    attached = []
    deferred = np.asarray(step.deferred)
    everything = bool(deferred.all())
    chosen = torch.from_numpy(deferred.nonzero()[0])
    sizes = (step.batch.start[1:] - step.batch.start[:-1])[chosen]
    start = torch.zeros(len(chosen) + 1, dtype=torch.int32)
    torch.cumsum(sizes, 0, out=start[1:])
    is_tree_row = np.zeros(step.num_rows, dtype=bool)
    for root, size in zip(step.root_rows[deferred].tolist(), sizes.tolist(), strict=True):
        is_tree_row[root : root + size] = True
    of_batch = torch.repeat_interleave(torch.from_numpy(deferred), step.batch.start[1:] - step.batch.start[:-1])
    prefix_lens = step.batch.positions[step.batch.start[:-1].long()].int()[chosen]
    rows, rest = (torch.from_numpy(mask.nonzero()[0]) for mask in (is_tree_row, ~is_tree_row))
    for gid, groups in enumerate(attn_groups):
        for group in groups:
            stock = metadata[group.layer_names[0]]
            trees = TreeRows(
                rows=None if everything else rows,
                start=start,
                ancestors=step.batch.ancestors[of_batch].contiguous(),
                prefix_lens=prefix_lens,
                block_table=stock.block_table[chosen],
            )
            attention = TreeAttentionStep(trees)
            if not everything:
                others = torch.from_numpy((~deferred).nonzero()[0])
                attention.rest_rows = rest
                lengths = (common.query_start_loc_cpu[1:] - common.query_start_loc_cpu[:-1])[others]
                attention.rest_metadata = group.get_metadata_builder().build(
                    0, metadata_of(common, others, lengths, stock.block_table, step.slots[gid][rest])
                )
            stock.adaptivespec = attention
            attached.append(attention)
    return attached


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention that also knows tree rows."""

    cache_views: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def adopt(cls, impl: CPUAttentionBackendImpl) -> TreeCPUAttentionImpl:
        """The same implementation (same state), with tree rows."""
        adopted = cls.__new__(cls)
        adopted.__dict__ = impl.__dict__
        return adopted

    def bind(self, layer: Any, kv_cache: torch.Tensor) -> None:
        """Learn the layout of the layer's cache.

        Raises:
            LayoutError: the layout is not understood.

        """
        _, heads, block_size, both = kv_cache.shape
        layout = _layout_of(layer.isa, block_size, heads, both // 2, kv_cache.dtype, self.kv_cache_dtype)
        self.cache_views = layout.views(kv_cache)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a batch that may hold trees; arguments as in vLLM."""
        step: TreeAttentionStep | None = getattr(attn_metadata, "adaptivespec", None)
        if step is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        started = time.perf_counter()
        trees, name = step.trees, layer.layer_name
        if trees.rows is None:
            n = trees.ancestors.shape[0]
            trees.attend(name, query[:n], key[:n], value[:n], self.cache_views, self.scale, output[:n])
            step.seconds += time.perf_counter() - started
            return output
        rows = trees.rows
        tree_out = torch.empty_like(query[rows])
        trees.attend(name, query[rows], key[rows], value[rows], self.cache_views, self.scale, tree_out)
        output[rows] = tree_out
        step.seconds += time.perf_counter() - started
        rest = step.rest_rows
        assert rest is not None
        rest_query = query[rest]
        rest_out = torch.empty_like(rest_query)
        super().forward(layer, rest_query, key[rest], value[rest], kv_cache, step.rest_metadata, rest_out)
        output[rest] = rest_out
        return output


@functools.cache
def _layout_of(isa: str, block_size: int, heads: int, dim: int, dtype: torch.dtype, kv_cache_dtype: str) -> PagedLayout:
    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        halves = cache.view(cache.shape[0], heads, 2 * block_size, dim)
        key_cache, value_cache = halves.chunk(2, dim=2)
        vllm_ops.cpu_attn_reshape_and_cache(
            key, value, key_cache, value_cache, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=kv_cache_dtype
        )

    try:
        return probe_layout(write, block_size, heads, dim, dtype)
    except LayoutError as error:
        raise LayoutError(
            f"the KV cache layout of vLLM's CPU attention kernel '{isa}' (block size {block_size}, head size {dim}, "
            f"{dtype}) is not understood: {error}"
        ) from error
