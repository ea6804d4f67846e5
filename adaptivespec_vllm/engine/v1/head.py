"""An EAGLE-3 head of vLLM as the expansion sees it: one lean call a level.

Levels below the first need no forward context, no slots and no paged writes: the head's own modules are called
directly, with its attention pointed at a dense scratch of the expanded nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import LevelRows


class LevelAttention(nn.Module):
    """Stands in for a head layer's attention during a level."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._impl = layer.impl
        self._key_shape = (-1, layer.num_kv_heads, layer.head_size)
        self._query_shape = (-1, layer.num_heads, layer.head_size)
        self._scratch = torch.empty(0)
        self._level: _Level | None = None

    def begin(self, rows: int, dtype: torch.dtype) -> None:
        """Room for the expanded nodes of a step (all requests)."""
        shape = (2, rows, *self._key_shape[1:])
        if self._scratch.shape[1:2] < shape[1:2] or self._scratch.dtype != dtype:
            # Zeros, not garbage: rows outside a node's mask are read, never used.
            self._scratch = torch.zeros(shape, dtype=dtype)

    def at(self, level: _Level) -> None:
        """The level that the next call belongs to."""
        self._level = level

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend the paged prefix and the expanded ancestors; shapes as in vLLM's ``Attention``."""
        level = self._level
        assert level is not None
        keys, values = self._scratch[:, : level.capacity]
        keys.index_copy_(0, level.own, key.view(self._key_shape))
        values.index_copy_(0, level.own, value.view(self._key_shape))
        query = query.view(self._query_shape)
        out = torch.empty(query.shape, dtype=query.dtype)
        ops.tree_attention(
            query,
            keys,
            values,
            *self._impl.cache_views,
            level.block_table,
            level.prefix_lens,
            level.start,
            level.key_start,
            level.ancestors,
            self._impl.scale,
            out,
        )
        return out.view(query.shape[0], -1)


class _Level:
    """What a level's attention needs; rows of request b live at ``key_start[b]`` in the scratch."""

    def __init__(
        self, rows: LevelRows, key_start: torch.Tensor, prefix_lens: torch.Tensor, block_table: torch.Tensor
    ) -> None:
        counts = rows.start[1:] - rows.start[:-1]
        self.own = torch.repeat_interleave(key_start[:-1].long(), counts) + rows.scratch_rows
        self.capacity = int(key_start[-1])
        self.key_start = key_start
        self.prefix_lens = prefix_lens
        self.block_table = block_table
        self.start = rows.start
        self.ancestors = rows.ancestors


class Eagle3Head:
    """The head of one worker.

    Args:
        model: vLLM's EAGLE-3 model (Llama or Qwen3 head), loaded.

    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._inner = model.model
        offsets = getattr(model, "draft_id_to_target_id", None)
        self._target_ids = None if offsets is None else torch.arange(offsets.shape[0]) + offsets.data
        self._attention = [LevelAttention(layer.self_attn.attn) for layer in self._inner.layers]
        self._hidden = torch.empty(0)
        self.seconds = 0.0
        """Time spent in levels, in all."""

    def logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary ``[R, draft vocabulary]``."""
        return self._model.logits_processor(self._model.lm_head, last_hidden)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Token ids of the target's vocabulary."""
        return draft_ids if self._target_ids is None else self._target_ids[draft_ids]

    def begin(
        self, hidden: torch.Tensor, root_positions: torch.Tensor, block_table: torch.Tensor, capacity: int
    ) -> None:
        """Start the levels of a step.

        Args:
            hidden: ``[B, hidden]`` output of the first pass at each request's last row.
            root_positions: ``int32 [B]``; as many tokens of each request are in the head's paged cache.
            block_table: ``int32 [B, blocks]``.
            capacity: expanded nodes a request, at most.

        """
        self._hidden = hidden
        self._prefix_lens = root_positions
        self._block_table = block_table
        self._key_start = capacity * torch.arange(len(hidden) + 1, dtype=torch.int32)
        for attention in self._attention:
            attention.begin(len(hidden) * capacity, hidden.dtype)

    def level(self, rows: LevelRows) -> torch.Tensor:
        """Run the head over one level (see ``DraftHead``)."""
        started = time.perf_counter()
        level = _Level(rows, self._key_start, self._prefix_lens, self._block_table)
        for attention in self._attention:
            attention.at(level)
        with self._lean_attention():
            # forward() of the module class, not a call: a call would enter the compiled graph of vLLM.
            last_hidden, self._hidden = self._inner.forward(
                rows.tokens, rows.positions, self._hidden[rows.parent_rows], None
            )
        logits = self.logits(last_hidden)
        self.seconds += time.perf_counter() - started
        return logits

    @contextmanager
    def _lean_attention(self) -> Iterator[None]:
        modules = [layer.self_attn._modules for layer in self._inner.layers]
        stock = [m["attn"] for m in modules]
        for module, attention in zip(modules, self._attention, strict=True):
            module["attn"] = attention
        try:
            yield
        finally:
            for module, attention in zip(modules, stock, strict=True):
                module["attn"] = attention
