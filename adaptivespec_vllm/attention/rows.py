"""The rows of a target forward pass that are tree rows, and their attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from adaptivespec_vllm import ops


@dataclass(slots=True)
class TreeRows:
    """Tree rows of one forward pass; R rows of G requests.

    Attributes:
        rows: ``int64 [R]`` their places in the batch; ``None`` when the batch holds nothing else.
        start: ``int32 [G + 1]``, first of these rows of each request.
        ancestors: ``int64 [R]``.
        prefix_lens: ``int32 [G]``, tokens of each request in the paged cache.
        block_table: ``int32 [G, blocks]``.
        fresh: by layer, the keys and values ``[R, KV heads, head size]`` of these rows, kept until the accepted
            ones are committed.

    """

    rows: torch.Tensor | None
    start: torch.Tensor
    ancestors: torch.Tensor
    prefix_lens: torch.Tensor
    block_table: torch.Tensor
    fresh: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(
        self,
        layer_name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attention of the tree rows.

        Args:
            layer_name: under which their keys and values are kept.
            query: ``[R, heads, head size]``, tree rows only; so are ``key``, ``value`` and ``out``.
            key: fresh keys. They are copied: a compiled model reuses their memory in its next layer.
            value: fresh values.
            cache: key and value views of the paged cache.
            scale: softmax scale.
            out: written in place.

        """
        key, value = (t.clone(memory_format=torch.contiguous_format) for t in (key, value))
        self.fresh[layer_name] = (key, value)
        ops.tree_attention(
            query,
            key,
            value,
            cache[0],
            cache[1],
            self.block_table,
            self.prefix_lens,
            self.start,
            self.start,
            self.ancestors,
            scale,
            out,
        )
