"""An EAGLE-3 head of vLLM as proposer and expansion see it: one lean call a pass.

Levels below the first need no forward context, no slots and no paged writes. They run on packed weights where the head
is one that ``packed_head`` knows; otherwise the head's own modules are called directly, with its attention pointed at a
dense scratch of the expanded nodes. A head on packed weights also runs the first pass, where that has few rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import LevelRows
from adaptivespec_vllm.engine.v1.first_pass import Rows
from adaptivespec_vllm.engine.v1.packed_head import NotPacked, PackedHead
from adaptivespec_vllm.ops import LevelPlaces

logger = init_logger("vllm.adaptivespec")  # below vLLM's own, so that it is shown

_AGREEMENT = 1e-3
"""Largest difference between packed weights and the head's modules in a trial, relative to the largest value. Both
compute in float32: a level that is the same one differs by a hundredth of this at most."""

MOST_ROWS = 64
"""Rows of a request in a first pass on packed weights: as many as a row's mask has bits."""

_SEES_ROWS_BEFORE = torch.tensor([(1 << (row + 1)) - 1 for row in range(MOST_ROWS - 1)] + [-1])
"""Masks of rows that follow each other."""


class LevelAttention(nn.Module):
    """Stands in for a head layer's attention during a level."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._layer, self._impl = layer, layer.impl
        self._key_shape = (-1, layer.num_kv_heads, layer.head_size)
        self._query_shape = (-1, layer.num_heads, layer.head_size)
        self.scratch = torch.empty(0)
        """``[2, rows, Hkv, D]``, keys and values of the expanded nodes of all requests."""
        self._no_cache = (torch.empty(0, layer.num_kv_heads, 1, layer.head_size),) * 2
        self._places: LevelPlaces | None = None
        self._own = torch.empty(0)

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's paged keys and values; none before vLLM has made its cache."""
        return getattr(self._impl, "cache_views", self._no_cache)

    def begin(self, rows: int, dtype: torch.dtype) -> None:
        """Room for the expanded nodes of a step (all requests)."""
        shape = (2, rows, *self._key_shape[1:])
        if self.scratch.shape[1:2] < shape[1:2] or self.scratch.dtype != dtype:
            # Zeros, not garbage: rows outside a node's mask are read, never used.
            self.scratch = torch.zeros(shape, dtype=dtype)

    def store(self, slots: torch.Tensor) -> None:
        """Copy the first keys and values of the scratch to the paged cache.

        Args:
            slots: ``int64``, one a row; negative: not copied.

        """
        keys, values = self.scratch[:, : len(slots)]
        self._impl.do_kv_cache_update(self._layer, keys, values, self._layer.kv_cache, slots)

    def at(self, places: LevelPlaces) -> None:
        """Where the rows of the next call stand."""
        self._places = places
        counts = places.start[1:] - places.start[:-1]
        self._own = torch.repeat_interleave(places.key_start[:-1].long(), counts) + places.scratch_rows

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend the paged prefix and the expanded ancestors; shapes as in vLLM's ``Attention``."""
        places = self._places
        assert places is not None
        keys, values = self.scratch
        keys.index_copy_(0, self._own, key.view(self._key_shape))
        values.index_copy_(0, self._own, value.view(self._key_shape))
        query = query.view(self._query_shape)
        out = torch.empty(query.shape, dtype=query.dtype)
        ops.tree_attention(
            query,
            keys,
            values,
            *self.caches,
            places.block_table,
            places.prefix_lens,
            places.start,
            places.key_start,
            places.ancestors,
            self._impl.scale,
            out,
        )
        return out.view(query.shape[0], -1)


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
        self._last_position = self._inner.layers[0].self_attn.rotary_emb.cos_sin_cache.shape[0] - 1
        self._hidden = torch.empty(0)
        self.seconds = 0.0
        """Time spent in levels, in all."""
        self._packed = self._pack()

    @property
    def is_packed(self) -> bool:
        """Whether it runs on packed weights."""
        return self._packed is not None

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed weights, beside vLLM's own copy."""
        return 0 if self._packed is None else self._packed.bytes()

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        return int(self._model.logits_processor.org_vocab_size)

    def takes(self, rows: int) -> bool:
        """Whether ``first_pass`` is leaner than vLLM's, with so many rows of a request."""
        return self._packed is not None and rows <= MOST_ROWS

    def first_pass(
        self, rows: Rows, start: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pass over confirmed tokens, whose keys and values go to the paged cache.

        Args:
            rows: of all requests; each token is the one that follows the row's hidden states.
            start: ``int32 [B + 1]``, first row of each request.
            block_table: ``int32 [B, blocks]``.
            slots: ``int64 [R]``.

        Returns:
            ``[R, H]`` the hidden states that give logits, and those that a level continues.

        """
        first = start[:-1].long()
        of_request = torch.arange(len(rows)) - torch.repeat_interleave(first, (start[1:] - start[:-1]).long())
        places = LevelPlaces(
            rows.positions.clamp(max=self._last_position),
            start,
            of_request,
            _SEES_ROWS_BEFORE[of_request],
            start,
            rows.positions[first].int(),
            block_table,
        )
        fuse = self._model.combine_hidden_states if self._packed is None else self._packed.fuse
        hidden = fuse(rows.hidden)
        for attention in self._attention:
            attention.begin(len(rows), hidden.dtype)
        if self._packed is None:
            output = self._run_modules(rows.tokens.long(), hidden, places)
        else:
            output = self._packed.forward(
                rows.tokens.long(), torch.arange(len(rows)), hidden, places, *self._keys_and_values()
            )
        for attention in self._attention:
            attention.store(slots)
        return output

    def logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary ``[R, draft vocabulary]``."""
        if self._packed is not None:
            return self._packed.logits(last_hidden)
        return self._module_logits(last_hidden)

    def _module_logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
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

    def children(self, rows: LevelRows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over one level (see ``DraftHead``)."""
        log_probs, ids = ops.topk_logprobs(self.level(rows), width)
        return log_probs, self.to_target(ids)

    def level(self, rows: LevelRows) -> torch.Tensor:
        """Logits of the nodes of a level ``[R, draft vocabulary]``."""
        started = time.perf_counter()
        if self._packed is None:
            last_hidden, self._hidden = self._module_forward(rows)
        else:
            last_hidden, self._hidden = self._packed_forward(self._packed, rows)
        logits = self.logits(last_hidden)
        self.seconds += time.perf_counter() - started
        return logits

    def _places(self, rows: LevelRows) -> LevelPlaces:
        return LevelPlaces(
            rows.positions,
            rows.start,
            rows.scratch_rows,
            rows.ancestors,
            self._key_start,
            self._prefix_lens,
            self._block_table,
        )

    def _packed_forward(self, packed: PackedHead, rows: LevelRows) -> tuple[torch.Tensor, torch.Tensor]:
        return packed.forward(rows.tokens, rows.parent_rows, self._hidden, self._places(rows), *self._keys_and_values())

    def _keys_and_values(self) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Scratch and paged cache of each layer."""
        return [a.scratch for a in self._attention], [a.caches for a in self._attention]

    def _module_forward(self, rows: LevelRows) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run_modules(rows.tokens, self._hidden[rows.parent_rows], self._places(rows))

    def _run_modules(
        self, tokens: torch.Tensor, hidden: torch.Tensor, places: LevelPlaces
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for attention in self._attention:
            attention.at(places)
        with self._lean_attention():
            # forward() of the module class, not a call: a call would enter the compiled graph of vLLM.
            return self._inner.forward(tokens, places.positions, hidden, None)

    @torch.no_grad()
    def _pack(self) -> PackedHead | None:
        """The head on packed weights, if it is one that can be and a trial level agrees."""
        try:
            packed = PackedHead(self._model)
            self._try_level(packed)
        except NotPacked as reason:
            logger.info("AdaptiveSpec: drafts with the draft head's own modules: %s", reason)
            return None
        logger.info("AdaptiveSpec: drafts with %d MB of packed weights", packed.bytes() >> 20)
        return packed

    def _try_level(self, packed: PackedHead) -> None:
        """Three made-up nodes without a prefix, both ways."""
        window = self._last_position + 1
        rows = LevelRows(
            tokens=torch.tensor([0, 1, 2]),
            parent_rows=torch.tensor([0, 0, 0]),
            positions=torch.tensor([0, window // 2, window - 1]),
            start=torch.tensor([0, 3], dtype=torch.int32),
            scratch_rows=torch.tensor([0, 1, 2]),
            ancestors=torch.tensor([0b001, 0b011, 0b111]),
        )
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, self._inner.norm.weight.shape[0], generator=generator)
        auxiliary = torch.randn(2, self._inner.fc_input_size, generator=generator)
        self.begin(hidden, torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), 3)
        mine, theirs = self._packed_forward(packed, rows), self._module_forward(rows)
        pairs = [
            *zip(mine, theirs, strict=True),
            (packed.logits(mine[0]), self._module_logits(theirs[0])),
            (packed.fuse(auxiliary), self._model.combine_hidden_states(auxiliary)),
        ]
        if not all(torch.allclose(a, b, rtol=0, atol=_AGREEMENT * float(b.abs().max())) for a, b in pairs):
            raise NotPacked("a trial level came out differently")

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
