"""What the ops of a draft level take: packed linear layers, one layer of a head, where the rows of a level stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PANEL_OUTPUTS = 32


@dataclass(slots=True)
class PackedLinear:
    """A linear layer whose weights are bfloat16 values, packed for products with few rows.

    Attributes:
        weight: ``bfloat16 [ceil(N / 32), K, 16, 2]``: panels of 32 outputs, the last one padded with zeros; pair i of
            an input holds the weights of the panel's outputs i and 16 + i.
        bias: ``float32 [N]``, or None.
        outputs: N.

    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    outputs: int

    @classmethod
    def pack(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Pack weights ``[N, K]``, rounded to bfloat16 where they are not values of it already."""
        outputs, inputs = weight.shape
        panels = -(-outputs // PANEL_OUTPUTS)
        padded = torch.zeros(panels * PANEL_OUTPUTS, inputs, dtype=torch.bfloat16)
        padded[:outputs] = weight
        packed = padded.view(panels, 2, PANEL_OUTPUTS // 2, inputs).permute(0, 3, 2, 1).contiguous()
        return cls(packed, bias, outputs)

    def unpacked(self) -> torch.Tensor:
        """The weights as ``float32 [N, K]``."""
        panels, inputs, half, _ = self.weight.shape
        return self.weight.permute(0, 3, 2, 1).reshape(panels * 2 * half, inputs)[: self.outputs].float()


@dataclass(slots=True)
class DraftLayer:
    """A decoder layer of a draft head (D: head size, H: hidden size, I: intermediate size).

    Attributes:
        qkv: H (the first layer: 2 H) to (Hq + 2 Hkv) D.
        q_norm: ``float32 [D]``, norm of each query head before its rotation, or None.
        k_norm: the same for key heads.
        o: Hq D to H.
        post_norm: ``float32 [H]``, norm between attention and MLP.
        gate_up: H to 2 I, gates first.
        down: I to H.
        cos_sin: ``float32 [positions, rotated dimensions]``, cosines first.
        scale: factor of the attention scores.
        eps: of all norms.

    """

    qkv: PackedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    cos_sin: torch.Tensor
    scale: float
    eps: float


@dataclass(slots=True)
class LevelPlaces:
    """Where the R rows of a level of B requests stand.

    Attributes:
        positions: ``int64 [R]``.
        start: ``int32 [B + 1]``, first row of each request.
        scratch_rows: ``int64 [R]``, where each row's own key and value go, counted from its request's first.
        ancestors: ``int64 [R]``, bit j set: the row sees scratch row j of its request.
        key_start: ``int32 [B + 1]``, first scratch row of each request.
        prefix_lens: ``int32 [B]``, tokens of each request in the paged cache.
        block_table: ``int32 [B, blocks]``.

    """

    positions: torch.Tensor
    start: torch.Tensor
    scratch_rows: torch.Tensor
    ancestors: torch.Tensor
    key_start: torch.Tensor
    prefix_lens: torch.Tensor
    block_table: torch.Tensor
