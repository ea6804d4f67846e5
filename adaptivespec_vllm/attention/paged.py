"""Where a backend puts keys and values in its paged cache, learnt by looking.

vLLM's CPU backend keeps a block of one KV head as ``block_size * 2`` rows: a half of keys, then a half of values. How
a half is laid out depends on the instruction set its kernel was chosen for (keys may be transposed). Instead of
knowing each of them, known rows are written with the backend's own cache update and looked up again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

CacheWriter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes: keys ``[tokens, heads, dim]``, values, cache ``[blocks, heads, block_size, 2 * dim]``, slots ``[tokens]``."""


class LayoutError(RuntimeError):
    """The cache layout cannot be described by strides."""


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Strides of a token and of a dimension inside the key half and the value half of a block.

    Attributes:
        key: (token stride, dimension stride) in elements.
        value: the same for values.

    """

    key: tuple[int, int]
    value: tuple[int, int]

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a cache as strided views ``[blocks, heads, block_size, dim]``.

        Args:
            cache: ``[blocks, heads, block_size, 2 * dim]``, each (block, head) contiguous.

        """
        blocks, heads, block_size, both = cache.shape
        dim = both // 2
        block_stride, head_stride = cache.stride()[:2]
        size = (blocks, heads, block_size, dim)
        offset = cache.storage_offset()
        return (
            cache.as_strided(size, (block_stride, head_stride, *self.key), offset),
            cache.as_strided(size, (block_stride, head_stride, *self.value), offset + block_size * dim),
        )


def probe_layout(write: CacheWriter, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> PagedLayout:
    """Find the layout that ``write`` uses, and check it on random rows.

    Raises:
        LayoutError: the layout is not a matter of strides (packed formats), or keys and values share memory oddly.

    """

    def written(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(1, heads, block_size, 2 * dim, dtype=dtype)
        write(key, value, cache, torch.arange(block_size))
        return cache

    def place(half: int, token: int, d: int) -> int:
        rows = [torch.zeros(block_size, heads, dim, dtype=dtype) for _ in range(2)]
        rows[half][token, 0, d] = 1
        found = written(*rows)[0, 0].flatten().nonzero().flatten().tolist()
        start = half * block_size * dim
        if len(found) != 1 or not start <= found[0] < start + block_size * dim:
            raise LayoutError("a single cache element was not found where one half of a block should hold it")
        return found[0] - start

    strides = []
    for half in (0, 1):
        origin = place(half, 0, 0)
        strides.append((place(half, 1, 0) - origin, place(half, 0, 1) - origin))
        if origin:
            raise LayoutError("the first element of a block is not at its start")
    layout = PagedLayout(key=strides[0], value=strides[1])

    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, block_size, heads, dim, generator=generator).to(dtype)
    try:
        got_key, got_value = layout.views(written(key, value))
    except RuntimeError as error:
        raise LayoutError(str(error)) from error
    if not (torch.equal(got_key[0], key.transpose(0, 1)) and torch.equal(got_value[0], value.transpose(0, 1))):
        raise LayoutError("the cache layout is not a matter of strides")
    return layout
