"""Implementations of tree attention behind one signature, each checked and timed on the same cases.

To add one: a function that takes the arguments of ``ops.tree_attention`` and a line in ``IMPLEMENTATIONS``. A loader
returns the function, or the reason why it cannot run here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.attention import AttentionUnavailable, PagedKV
from adaptivespec_vllm.attention.triton_paged import TritonTreeAttention
from adaptivespec_vllm.ops import reference
from tests.gpu.checks import TOLERANCE, Check, attention_arguments, error_of, random_attention
from tests.kernels.cases import in_float64, places_of

Attend = Callable[..., None]
Loader = Callable[[torch.device], Attend | str]


def torch_prefix(arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the paged prefixes alone in plain torch: output ``[Tq, Hq, D]`` and log-sum-exp ``[Hq, Tq]``."""
    query, key_cache, value_cache = (arguments[name] for name in ("query", "key_cache", "value_cache"))
    out = torch.zeros_like(query)
    lse = torch.full((query.shape[1], query.shape[0]), -math.inf, device=query.device)
    group, starts = query.shape[1] // key_cache.shape[1], arguments["query_start"].tolist()
    for request, prefix in enumerate(arguments["prefix_lens"].tolist()):
        if prefix == 0:
            continue
        rows = slice(starts[request], starts[request + 1])
        blocks = arguments["block_table"][request, : -(-prefix // key_cache.shape[2])].long()
        keys, values = (
            cache[blocks].transpose(1, 2).flatten(0, 1)[:prefix].repeat_interleave(group, dim=1).float()
            for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * arguments["scale"]
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse


def merged(**arguments) -> None:
    """``tree_part_attention`` joined with a prefix part in plain torch by the log-sum-exps, as an engine joins it."""
    query, out = arguments["query"], arguments["out"]
    tree_out = torch.full_like(query, math.nan)
    tree_lse = torch.full((query.shape[1], query.shape[0]), math.nan, device=query.device)
    names = ("query", "tree_key", "tree_value", "query_start", "key_start", "ancestors", "scale")
    ops.tree_part_attention(**{name: arguments[name] for name in names}, out=tree_out, lse=tree_lse)
    prefix_out, prefix_lse = torch_prefix(arguments)
    both = torch.logaddexp(tree_lse, prefix_lse)
    parts = ((tree_out, tree_lse), (prefix_out, prefix_lse))
    total = sum(part.float() * (lse - both).exp().nan_to_num().t()[..., None] for part, lse in parts)
    out.copy_(total)


def triton_paged(device: torch.device) -> Attend | str:
    """The paged Triton kernel. Numbers that shape its launch are read once, outside of what is timed."""
    if device.type != "cuda":
        return "Triton's kernels run on a GPU; in its interpreter: tests/kernels/test_triton_attention.py"
    try:
        attention = TritonTreeAttention()
    except AttentionUnavailable as error:
        return str(error)
    known: dict[str, object] = {}

    def attend(*, query, tree_key, tree_value, key_cache, value_cache, scale, out, **places) -> None:
        if known.get("ancestors") is not places["ancestors"]:
            known.update(ancestors=places["ancestors"], places=places_of(places))
        attention(query, tree_key, tree_value, PagedKV(key_cache, value_cache), known["places"], scale, out)

    return attend


IMPLEMENTATIONS: dict[str, Loader] = {
    "op": lambda device: ops.tree_attention,
    "tree part + torch prefix": lambda device: merged,
    "triton": triton_paged,
}


def check_of(name: str) -> Check:
    """The check of one implementation; raises ``ModuleNotFoundError`` with the reason where it cannot run."""

    def check(device: torch.device, seed: int) -> float:
        attend = IMPLEMENTATIONS[name](device)
        if isinstance(attend, str):
            raise ModuleNotFoundError(attend)
        case = random_attention(device, seed, prefix=True)
        arguments = attention_arguments(device, case)
        out = torch.full_like(arguments["query"], math.nan)
        attend(**arguments, out=out)
        return error_of(out, in_float64(case).run(reference.tree_attention), 2 * TOLERANCE[out.dtype])

    return check
