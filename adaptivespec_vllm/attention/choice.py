"""Which implementation of tree attention is used, by the configuration's key ``attention``."""

from __future__ import annotations

import torch

from adaptivespec_vllm.attention.by_op import attend_by_op
from adaptivespec_vllm.attention.contract import AttentionUnavailable, TreeAttention
from adaptivespec_vllm.attention.flash import FlashTreeAttention, PrefixAttention
from adaptivespec_vllm.attention.merge import Merge, merge_by_lse

ALLOWED = {"cpu": ("auto",), "cuda": ("auto", "flash", "triton", "xformers")}
"""What ``attention`` may be, by the kind of device."""


def choose(
    name: str, device: str, *, prefix: PrefixAttention | None = None, merge: Merge = merge_by_lse
) -> tuple[str, TreeAttention]:
    """The implementation that a name stands for, and what it is called.

    Args:
        name: value of ``attention``; ``auto`` is our op on a CPU, on CUDA ``flash`` where there is one, else
            ``triton``.
        device: kind of device, ``cpu`` or ``cuda``.
        prefix: the platform's FlashAttention over the paged prefix; None where there is none.
        merge: joins prefix and tree parts.

    Raises:
        AttentionUnavailable: the name is not one for this kind of device, or what it needs is not there.

    """
    allowed = ALLOWED.get(device, ())
    if name not in allowed:
        choices = ", ".join(map(repr, allowed)) or "none"
        raise AttentionUnavailable(f"attention: got {name!r}; allowed on {device.upper()}: {choices}")
    if device == "cpu":
        return "our op", attend_by_op
    if name == "auto":
        name = "triton" if prefix is None else "flash"
    if name == "flash":
        if prefix is None:
            raise AttentionUnavailable(
                "attention: got 'flash'; vLLM does not run FlashAttention for these layers; allowed: 'auto', 'triton'"
            )
        return name, FlashTreeAttention(prefix, merge)
    if name == "triton":
        from adaptivespec_vllm.attention.triton_paged import TritonTreeAttention

        return name, TritonTreeAttention()
    from adaptivespec_vllm.attention.xformers_partial import XformersTreeAttention

    return name, XformersTreeAttention(torch.device(device))
