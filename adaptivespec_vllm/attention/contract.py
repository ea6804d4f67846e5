"""What an attention of tree rows is given, whichever way it computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from adaptivespec_vllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TreePlaces:
    """Where the tree rows of one pass stand: R query rows and K fresh keys of G requests.

    The numbers that shape a launch are on the host too, so that no pass waits for the device.

    Attributes:
        block_table: ``int32 [G, blocks]``.
        prefix_lens: ``int32 [G]``, tokens of each request in the paged cache; may be 0.
        query_start: ``int32 [G + 1]``, each request's query rows.
        key_start: ``int32 [G + 1]``, each request's fresh keys; at most 64.
        ancestors: ``int64 [R]``, bit j set: fresh key j of the request is visible. Bits past them are ignored.
        prefixes: ``prefix_lens`` on the host.
        queries: query rows of each request, on the host.
        keys: fresh keys of each request, on the host.

    """

    block_table: torch.Tensor
    prefix_lens: torch.Tensor
    query_start: torch.Tensor
    key_start: torch.Tensor
    ancestors: torch.Tensor
    prefixes: Sequence[int]
    queries: Sequence[int]
    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The paged cache of one layer.

    Attributes:
        key: ``[blocks, KV heads, block_size, head size]`` with any strides.
        value: the same.
        key_scale: ``float32`` tensor of one element, factor of the stored keys of an fp8 cache; None: they are as the
            model computed them.
        value_scale: the same for values.

    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


class TreeAttention(Protocol):
    """Attention of tree rows over (paged prefix) ∪ (visible fresh keys)."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKV,
        places: TreePlaces,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Write ``out``; a row that sees no key becomes zeros.

        Args:
            query: ``[R, heads, head size]``, head size contiguous.
            key: ``[K, KV heads, head size]``, fresh keys, as the model computed them.
            value: the same for values.
            cache: the layer's paged keys and values.
            places: where the rows stand.
            scale: factor of the scores.
            out: ``[R, heads, head size]``, in the model's dtype.

        """


class AttentionUnavailable(ConfigError):
    """An implementation of tree attention that was asked for cannot be used here: names it and says why."""
