"""vLLM's attention with tree rows, on any device.

A layer's attention implementation is replaced by a subclass with :class:`TreeAttentionImpl` in it after the model is
loaded. As long as the metadata of a forward pass carries no trees it is vLLM's own implementation, call for call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from adaptivespec_vllm.attention import PagedKV, TreeAttention, TreePlaces, TreeRows
from adaptivespec_vllm.engine.v1.first_pass import metadata_of
from adaptivespec_vllm.engine.v1.step import Step
from adaptivespec_vllm.engine.v1.transfer import to_device


class Attached(Protocol):
    """What metadata of a forward pass may carry under the name ``adaptivespec``: attention of a tree's rows."""

    def attend(
        self,
        impl: TreeAttentionImpl,
        stock: Callable[..., Any],
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write ``output``; rows without a tree by ``stock``, vLLM's own ``forward``."""


class TreeAttentionImpl:
    """Mixed into an attention implementation of vLLM, before it."""

    scale: float

    @classmethod
    def adopt(cls, impl: Any) -> Any:
        """The same implementation (same state), with tree rows."""
        adopted = cls.__new__(cls)
        adopted.__dict__ = impl.__dict__
        return adopted

    def paged_kv(self, layer: Any, kv_cache: torch.Tensor) -> PagedKV:
        """The layer's cache ``[blocks, KV heads, block_size, 2 * head size]`` as keys and values."""
        raise NotImplementedError

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a batch that may hold trees; arguments as in vLLM."""
        attached: Attached | None = getattr(attn_metadata, "adaptivespec", None)
        if attached is None:
            return super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        attached.attend(self, super().forward, layer, query, key, value, kv_cache, output)  # type: ignore[misc]
        return output


@dataclass(slots=True)
class TreeAttentionStep:
    """Attached to the metadata of the target's forward pass over trees.

    Attributes:
        trees: the tree rows.
        rest_rows: ``int64``, all other rows (prefills); ``None`` when there are none.
        rest_metadata: vLLM's metadata of those rows alone.
        seconds: time the host spent on tree rows, summed over layers.

    """

    trees: TreeRows
    rest_rows: torch.Tensor | None = None
    rest_metadata: Any = None
    seconds: float = 0.0

    def attend(
        self,
        impl: TreeAttentionImpl,
        stock: Callable[..., Any],
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """See :class:`Attached`. Rows beyond the batch, which pad it to the size of a graph, stay as they are."""
        started = time.perf_counter()
        trees, name, cache = self.trees, layer.layer_name, impl.paged_kv(layer, kv_cache)
        if trees.rows is None:
            n = len(trees)
            trees.attend(name, query[:n], key[:n], value[:n], cache, impl.scale, output[:n])
            self.seconds += time.perf_counter() - started
            return
        rows = trees.rows
        tree_query = query[rows]
        tree_out = torch.empty_like(tree_query)
        trees.attend(name, tree_query, key[rows], value[rows], cache, impl.scale, tree_out)
        output[rows] = tree_out
        self.seconds += time.perf_counter() - started
        rest = self.rest_rows
        assert rest is not None
        rest_query = query[rest]
        rest_out = torch.empty_like(rest_query)
        stock(layer, rest_query, key[rest], value[rest], kv_cache, self.rest_metadata, rest_out)
        output[rest] = rest_out


def attach_trees(
    step: Step,
    attn_groups: Sequence[Sequence[Any]],
    metadata: Mapping[str, Any],
    common: Any,
    attention: TreeAttention,
    device: torch.device,
) -> list[TreeAttentionStep]:
    """Make the target's forward pass attend the trees of a step.

    Args:
        step: has trees.
        attn_groups: vLLM's groups of attention layers, by KV cache group.
        metadata: vLLM's attention metadata by layer.
        common: its common metadata of the batch.
        attention: computes the tree rows.
        device: of the model.

    Returns:
        What was attached, one a group, in their order.

    """
    deferred = np.asarray(step.deferred)
    everything = bool(deferred.all())
    batch_start = step.batch.start.numpy()
    all_sizes = np.diff(batch_start)
    sizes = all_sizes[deferred]
    start_host = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=start_host[1:])
    prefixes = step.batch.positions.numpy()[batch_start[:-1]][deferred].astype(np.int32)
    is_tree_row = np.zeros(step.num_rows, dtype=bool)
    for root, size in zip(step.root_rows[deferred].tolist(), sizes.tolist(), strict=True):
        is_tree_row[root : root + size] = True
    rows, rest = is_tree_row.nonzero()[0], (~is_tree_row).nonzero()[0]

    chosen = to_device(deferred.nonzero()[0], device)
    start, prefix_lens = to_device(start_host, device), to_device(prefixes, device)
    ancestors = to_device(step.batch.ancestors.numpy()[np.repeat(deferred, all_sizes)], device)
    tree_rows = None if everything else to_device(rows, device)
    rest_rows = None if everything else to_device(rest, device)
    others = (~deferred).nonzero()[0].tolist()
    attached = []
    for gid, groups in enumerate(attn_groups):
        for group in groups:
            stock = metadata[group.layer_names[0]]
            places = TreePlaces(
                block_table=stock.block_table[chosen],
                prefix_lens=prefix_lens,
                query_start=start,
                key_start=start,
                ancestors=ancestors,
                prefixes=prefixes.tolist(),
                queries=sizes.tolist(),
                keys=sizes.tolist(),
            )
            of_group = TreeAttentionStep(TreeRows(tree_rows, places, attention), rest_rows)
            if rest_rows is not None:
                lengths = (common.query_start_loc_cpu[1:] - common.query_start_loc_cpu[:-1])[others].tolist()
                of_group.rest_metadata = group.get_metadata_builder().build(
                    0, metadata_of(common, others, lengths, stock.block_table, step.slots[gid][rest_rows])
                )
            stock.adaptivespec = of_group
            attached.append(of_group)
    return attached
