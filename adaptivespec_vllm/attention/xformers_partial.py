"""Tree attention by xFormers' partial attention: paged prefix and masked tree, merged by log-sum-exp.

An alternative to ``flash``, and a check of it that shares no kernel with it. The tree part is one dense mask of all
rows by all fresh keys, and xFormers chooses the kernels. Written against the interface of xFormers 0.0.35; whether
its kernels run depends on versions beside it, so a small case is tried at start.
"""

from __future__ import annotations

from typing import Any

import torch

from adaptivespec_vllm.attention.contract import AttentionUnavailable, PagedKV, TreePlaces
from adaptivespec_vllm.ops import reference

_PAGE = 64
"""Tokens that its paged kernel reads at a time: blocks of the cache hold a multiple of it."""

_ALIGNED = 8
"""Columns of a mask in memory are a multiple of it."""


def _load() -> Any:
    try:
        from xformers.ops import fmha
    except ImportError as error:
        raise AttentionUnavailable(
            f"attention: got 'xformers', which cannot be imported ({error}); install xformers, or use 'auto'"
        ) from error
    needed = {
        "memory_efficient_attention_partial": fmha,
        "merge_attentions": fmha,
        "PagedBlockDiagonalPaddedKeysMask": getattr(fmha, "attn_bias", None),
    }
    missing = [name for name, owner in needed.items() if not hasattr(owner, name)]
    if missing:
        import xformers

        version = getattr(xformers, "__version__", "of unknown version")
        raise AttentionUnavailable(
            f"attention: got 'xformers', whose installed version {version} has no {', '.join(missing)}; "
            "install xformers 0.0.35 or newer, or use 'auto'"
        )
    return fmha


class XformersTreeAttention:
    """See :class:`~adaptivespec_vllm.attention.contract.TreeAttention`.

    Args:
        device: on which a small case is tried.

    Raises:
        AttentionUnavailable: xFormers is not installed, too old, or fails at the small case.

    """

    def __init__(self, device: torch.device) -> None:
        self._fmha = _load()
        self._try(device)

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
        rows, heads, dim = query.shape
        kv_heads = key.shape[1]
        grouped = query.view(1, rows, kv_heads, heads // kv_heads, dim)
        parts = [self._tree(grouped, key, value, places, scale)]
        if any(places.prefixes):
            parts.append(self._prefix(grouped, cache, places, scale))
        outputs, lses = zip(*parts, strict=True)
        merged = (
            outputs[0]
            if len(parts) == 1
            else self._fmha.merge_attentions(list(outputs), list(lses), write_lse=False, output_dtype=out.dtype)[0]
        )
        out.copy_(merged.reshape(rows, heads, dim))

    def _try(self, device: torch.device) -> None:
        """Two requests, one of them without a prefix, against the reference."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, torch.float16)

        start = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
        places = TreePlaces(
            block_table=torch.tensor([[1, 2], [0, 0]], dtype=torch.int32, device=device),
            prefix_lens=torch.tensor([70, 0], dtype=torch.int32, device=device),
            query_start=start,
            key_start=start,
            ancestors=torch.tensor([1, 3, 5, 1, 3], device=device),
            prefixes=[70, 0],
            queries=[3, 2],
            keys=[3, 2],
        )
        query, key, value, out = draw(5, 4, 64), draw(5, 2, 64), draw(5, 2, 64), draw(5, 4, 64)
        cache = PagedKV(*(draw(3, _PAGE, 2, 64).transpose(1, 2) for _ in range(2)))
        wanted = torch.empty_like(out)
        reference.tree_attention(
            query, key, value, cache.key, cache.value, places.block_table, places.prefix_lens, start, start,
            places.ancestors, 0.125, wanted,
        )  # fmt: skip
        try:
            self(query, key, value, cache, places, 0.125, out)
        except Exception as error:
            raise AttentionUnavailable(
                f"attention: got 'xformers', which fails here at a small case ({type(error).__name__}: {error}); "
                "allowed: 'auto', 'flash', 'triton'"
            ) from error
        if not torch.allclose(out, wanted, atol=1e-2, rtol=1e-2):
            raise AttentionUnavailable(
                "attention: got 'xformers', which gives other numbers than the reference at a small case; "
                "allowed: 'auto', 'flash', 'triton'"
            )

    def _prefix(
        self, query: torch.Tensor, cache: PagedKV, places: TreePlaces, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        block_size = cache.key.shape[2]
        if block_size % _PAGE:
            raise AttentionUnavailable(
                f"attention: got 'xformers' with block_size {block_size}; allowed with it: a multiple of {_PAGE}"
            )
        bias = self._fmha.attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=list(places.queries),
            kv_seqlen=list(places.prefixes),
            block_tables=places.block_table,
            page_size=block_size,
            device=query.device,
        )
        keys, values = (_grouped(_tokens(pages), query.shape[3]) for pages in (cache.key, cache.value))
        return self._partial(query, keys, values, bias, scale)

    def _tree(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: TreePlaces, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bias = tree_bias(places, len(key), query.dtype)
        _, rows, kv_heads, group, _ = query.shape
        bias = bias.expand(1, kv_heads, group, rows, len(key))
        return self._partial(query, _grouped(key, group), _grouped(value, group), bias, scale)

    def _partial(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: Any, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._fmha.memory_efficient_attention_partial(query, keys, values, attn_bias=bias, scale=scale)


def tree_bias(places: TreePlaces, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """``[R, keys]``: 0 where a row sees a fresh key, -inf everywhere else; rows are aligned in memory."""
    device, rows = places.ancestors.device, len(places.ancestors)
    of_row = torch.repeat_interleave(
        torch.arange(len(places.queries)), torch.tensor(places.queries), output_size=rows
    ).to(device)
    start = places.key_start.long()
    at = torch.arange(keys, device=device)
    column = at - start[of_row][:, None]
    own = (column >= 0) & (at < start[of_row + 1][:, None])
    visible = own & ((places.ancestors[:, None] >> column.clamp(0, 63)) & 1).bool()
    wide = torch.zeros(rows, -(-keys // _ALIGNED) * _ALIGNED, dtype=dtype, device=device)[:, :keys]
    return wide.masked_fill_(~visible, -torch.inf)


def _tokens(pages: torch.Tensor) -> torch.Tensor:
    """``[blocks, heads, block_size, D]`` as ``[blocks * block_size, heads, D]`` without a copy."""
    blocks, heads, block_size, dim = pages.shape
    try:
        return pages.transpose(1, 2).view(blocks * block_size, heads, dim)
    except RuntimeError:
        raise AttentionUnavailable(
            "attention: got 'xformers' with a KV cache that is not token-major; allowed with it: "
            "VLLM_KV_CACHE_LAYOUT=NHD"
        ) from None


def _grouped(tokens: torch.Tensor, group: int) -> torch.Tensor:
    """``[K, KV heads, D]`` as ``[1, K, KV heads, group, D]``, the group without a copy."""
    count, kv_heads, dim = tokens.shape
    return tokens[None, :, :, None].expand(1, count, kv_heads, group, dim)
