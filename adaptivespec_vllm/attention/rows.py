"""The rows of a target forward pass that are tree rows, and their attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from adaptivespec_vllm.attention.by_op import attend_by_op
from adaptivespec_vllm.attention.contract import PagedKV, TreeAttention, TreePlaces


@dataclass(slots=True)
class TreeRows:
    """Tree rows of one forward pass; R rows of G requests.

    Attributes:
        rows: ``int64 [R]`` their places in the batch; ``None`` when the batch holds nothing else.
        places: where they stand; each row has a fresh key of its own.
        attention: what computes it.
        fresh: by layer, the keys and values ``[R, KV heads, head size]`` of these rows, kept until the accepted
            ones are committed.

    """

    rows: torch.Tensor | None
    places: TreePlaces
    attention: TreeAttention = attend_by_op
    fresh: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.places.ancestors)

    def attend(
        self,
        layer_name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKV,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attention of the tree rows.

        Args:
            layer_name: under which their keys and values are kept.
            query: ``[R, heads, head size]``, tree rows only; so are ``key``, ``value`` and ``out``.
            key: fresh keys. They are copied: a compiled model reuses their memory in its next layer.
            value: fresh values.
            cache: the layer's paged keys and values.
            scale: softmax scale.
            out: written in place.

        """
        key, value = (t.clone(memory_format=torch.contiguous_format) for t in (key, value))
        self.fresh[layer_name] = (key, value)
        self.attention(query, key, value, cache, self.places, scale, out)
