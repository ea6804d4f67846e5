"""An EAGLE-3 head on a GPU, as vLLM loads, compiles and captures it, run over the levels of trees.

A level is a forward pass of vLLM's own model under a forward context of our own: no slots, so nothing reaches the
paged cache, and metadata that points the attention at a dense scratch of the expanded nodes. Rows are padded to a
captured size where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import set_forward_context

from adaptivespec_vllm import ops
from adaptivespec_vllm.attention import TreeAttention, TreePlaces
from adaptivespec_vllm.draft import AheadRows
from adaptivespec_vllm.engine.v1.transfer import to_device
from adaptivespec_vllm.engine.v1.tree_attention import TreeAttentionImpl

NO_SLOT = -1


@dataclass(slots=True)
class LevelAttention:
    """Attached to the metadata of the head's forward pass over a level.

    Attributes:
        places: where the nodes stand; their keys are all rows of the scratch.
        own: ``int64 [R]``, scratch row of each node.
        scratch: by layer, keys and values ``[2, rows, KV heads, head size]`` of the expanded nodes.
        attention: computes it.

    """

    places: TreePlaces
    own: torch.Tensor
    scratch: dict[str, torch.Tensor]
    attention: TreeAttention

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
        """See :class:`tree_attention.Attached`."""
        n = len(self.own)
        keys, values = self.scratch[layer.layer_name]
        keys.index_copy_(0, self.own, key[:n])
        values.index_copy_(0, self.own, value[:n])
        self.attention(query[:n], keys, values, impl.paged_kv(layer, kv_cache), self.places, impl.scale, output[:n])


@dataclass(slots=True)
class LevelMetadata:
    """What vLLM hands an attention layer of the head during a level."""

    adaptivespec: LevelAttention


class CUDAHead:
    """The head of one worker (``draft.DeviceHead``).

    Args:
        proposer: vLLM's, with the model loaded; its buffers are the graphs' own.

    """

    is_packed = False
    packed_bytes = 0

    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer
        model = proposer.model
        self._project = lambda hidden: model.logits_processor(model.lm_head, hidden)
        offsets = getattr(model, "draft_id_to_target_id", None)
        self._target_ids = (
            None if offsets is None else torch.arange(offsets.shape[0], device=offsets.device) + offsets.data
        )
        self.vocabulary = int(model.logits_processor.org_vocab_size)
        self._layers = {layer.self_attn.attn.layer_name: layer.self_attn.attn for layer in model.model.layers}
        self._scratch: dict[str, torch.Tensor] = {}

    def logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary ``[R, draft vocabulary]``."""
        return self._project(last_hidden)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Token ids of the target's vocabulary."""
        return draft_ids if self._target_ids is None else self._target_ids[draft_ids]

    def begin(
        self, hidden: torch.Tensor, roots: Sequence[int], block_table: torch.Tensor, width: int, depth: int
    ) -> None:
        """Start the levels of G trees.

        Args:
            hidden: ``[G, hidden]`` output of the first pass at each request's last row.
            roots: ``[G]`` positions; as many tokens of each request are in the head's paged cache.
            block_table: ``int32 [G, blocks]``.
            width: nodes of a level.
            depth: levels of the trees; the last one is not expanded.

        """
        trees, device = len(roots), hidden.device
        self._hidden, self._block_table, self._width = hidden, block_table, width
        self._roots, self._prefixes = to_device(torch.tensor(roots), device), list(roots)
        self._prefix_lens = self._roots.int()
        self._tree = torch.arange(trees, device=device)
        self._capacity = width * (depth - 1)
        self._query_start = width * torch.arange(trees + 1, dtype=torch.int32, device=device)
        self._key_start = self._capacity * torch.arange(trees + 1, dtype=torch.int32, device=device)
        self._no_slots = torch.full((trees * width,), NO_SLOT, dtype=torch.int64, device=device)
        for name, layer in self._layers.items():
            shape = (2, trees * self._capacity, layer.num_kv_heads, layer.head_size)
            kept = self._scratch.get(name)
            if kept is None or kept.shape[1] < shape[1] or kept.dtype != hidden.dtype:
                # Zeros, not garbage: rows outside a node's mask are read, never used.
                self._scratch[name] = torch.zeros(shape, dtype=hidden.dtype, device=device)

    def children_of(self, rows: AheadRows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``draft.DeviceHead``."""
        log_probs, ids = ops.topk_logprobs(self.level(rows), width)
        trees = len(rows.tokens)
        return log_probs.view(trees, -1, width), self.to_target(ids).view(trees, -1, width)

    def level(self, rows: AheadRows) -> torch.Tensor:
        """Logits of the nodes of a level ``[G * W, draft vocabulary]``."""
        trees, width = rows.tokens.shape
        # Level 1 continues the first pass, which has a row a tree; every other one the level before.
        parent_rows = (self._tree[:, None] * (1 if rows.depth == 1 else self._width) + rows.parents).flatten()
        scratch_rows = torch.arange(width, device=self._tree.device) + (rows.depth - 1) * self._width
        places = TreePlaces(
            block_table=self._block_table,
            prefix_lens=self._prefix_lens,
            query_start=self._query_start,
            key_start=self._key_start,
            ancestors=rows.ancestors.flatten(),
            prefixes=self._prefixes,
            queries=[width] * trees,
            keys=[self._capacity] * trees,
        )
        own = (self._tree[:, None] * self._capacity + scratch_rows).flatten()
        scratch = {name: kept[:, : trees * self._capacity] for name, kept in self._scratch.items()}
        attention = LevelAttention(places, own, scratch, self._proposer.runner.attention)
        # A node's position for the head is one less than its place in the sequence.
        positions = (self._roots[:, None] + (rows.depth - 1)).expand(trees, width).flatten()
        last_hidden, hidden = self._forward(rows.tokens.flatten(), positions, self._hidden[parent_rows], attention)
        self._hidden = hidden
        return self.logits(last_hidden)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attention: LevelAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        proposer, n = self._proposer, len(tokens)
        mode, padded, across = proposer._determine_batch_execution_and_padding(n)
        proposer.input_ids[:n] = tokens
        proposer._set_positions(n, positions)
        proposer.hidden_states[:n] = hidden
        arguments, size = proposer.build_model_inputs_first_pass(n, padded, None)
        with set_forward_context(
            dict.fromkeys(self._layers, LevelMetadata(attention)),
            proposer.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            slot_mapping=proposer._get_slot_mapping(size, self._no_slots[:n]),
        ):
            last_hidden, aux_hidden = proposer.model(**arguments)
        return last_hidden[:n], aux_hidden[:n]
