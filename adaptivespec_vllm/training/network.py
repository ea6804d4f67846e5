"""An EAGLE-3 head (one Llama layer) as it is trained: the same computation as vLLM's, over whole answers at once.

A draft of depth k continues from the head's own output k - 1 times. Training unrolls this (training-time test): step k
takes the hidden states that step k - 1 gave and the next token of the text. A row sees the true features of all
positions up to its own, and its own earlier steps: exactly what it will see when it drafts.

Only rows of answers are computed. The prompt contributes keys and values, and logits exist for rows that count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from adaptivespec_vllm.training.features import Example


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head. Everything but the draft vocabulary is the target's unless it is asked for otherwise."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    draft_vocabulary: int
    fc_norm: bool = True
    norm_output: bool = True


@dataclass
class Batch:
    """Examples padded to one length L; position t of row b is token t of example b.

    Attributes:
        tokens: ``int64 [B, L]``.
        features: ``[B, L, 3 * hidden]``.
        hidden: ``[B, L, hidden]``.
        lengths: ``int64 [B]``.
        answer_starts: ``int64 [B]``.

    """

    tokens: torch.Tensor
    features: torch.Tensor
    hidden: torch.Tensor
    lengths: torch.Tensor
    answer_starts: torch.Tensor

    @staticmethod
    def of(examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
        def pad(parts: list[torch.Tensor]) -> torch.Tensor:
            return nn.utils.rnn.pad_sequence(parts, batch_first=True).to(device)

        return Batch(
            tokens=pad([e.tokens for e in examples]),
            features=pad([e.features for e in examples]),
            hidden=pad([e.hidden for e in examples]),
            lengths=torch.tensor([len(e.tokens) for e in examples], device=device),
            answer_starts=torch.tensor([e.answer_start for e in examples], device=device),
        )

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(b, t) of every position that drafts: its own token and the next are known, the one after is to be drafted.

        The first is the last token of the prompt, whose successor begins the answer.
        """
        t = torch.arange(self.tokens.shape[1], device=self.tokens.device)[None, :]
        valid = (t >= self.answer_starts[:, None] - 1) & (t <= self.lengths[:, None] - 3)
        b, t = valid.nonzero(as_tuple=True)
        return b, t


@dataclass
class StepOutput:
    """One unrolled step over N rows.

    Attributes:
        logits: ``[N, draft vocabulary]``.
        b: ``int64 [N]``, example of each row.
        at: ``int64 [N]``, position whose successor the row drafts.

    """

    logits: torch.Tensor
    b: torch.Tensor
    at: torch.Tensor


class RMSNorm(nn.Module):
    """Root mean square normalisation, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)


class _MLP(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = _Attention(shape)
        self.mlp = _MLP(shape)


class Eagle3Network(nn.Module):
    """The head. Its state dict has the names that vLLM loads.

    Args:
        shape: sizes.
        embedding: ``[target vocabulary, hidden]``, the target's, not trained and not in the state dict.

    """

    def __init__(self, shape: HeadShape, embedding: torch.Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.hidden, shape.norm_eps) for _ in range(3))
        self.midlayer = _Layer(shape)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocabulary, bias=False)
        self.register_buffer("_embedding", embedding, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def start_from(self, output_weight: torch.Tensor, output_norm: torch.Tensor) -> None:
        """Begin with the target's own output layer, behind a head that hands on the deepest features.

        Args:
            output_weight: ``[draft vocabulary, hidden]``, rows of the target's output layer.
            output_norm: ``[hidden]``, weight of the target's last norm.

        """
        size = self.shape.hidden
        with torch.no_grad():
            self.lm_head.weight.copy_(output_weight)
            # Far less sure of itself than the target, until it has reason to be.
            self.norm.weight.copy_(0.3 * output_norm)
            self.fc.weight.mul_(0.5)
            self.fc.weight[:, 2 * size :] += torch.eye(size)

    def steps(self, batch: Batch, count: int, keep: float = 1.0, seed: int = 0) -> Iterator[StepOutput]:
        """Unroll ``count`` steps over all answers.

        Args:
            batch: examples.
            count: steps.
            keep: share of the rows, drawn at random, with which each further step goes on. Rows do not see each
                other's later steps, so this changes no row that stays.
            seed: of that draw.

        """
        attention, shape = self.midlayer.self_attn, self.shape
        b, t = batch.rows()
        fused = self._fuse(batch.features)  # [B, L, hidden]
        context = self._inputs(batch.tokens.roll(-1, 1), fused)
        keys = self._rope(self._heads(attention.k_proj(context), shape.kv_heads), torch.arange(context.shape[1]))
        values = self._heads(attention.v_proj(context), shape.kv_heads)  # [B, L, kv heads, head_dim]
        first, hidden = int(t.min()), fused[b, t]
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        draw = torch.Generator().manual_seed(seed)
        for step in range(count):
            if step:
                stay = (t + step <= batch.lengths[b] - 3) & (torch.rand(len(t), generator=draw) < keep).to(t.device)
                b, t, hidden = b[stay], t[stay], hidden[stay]
                own = [(k[stay], v[stay]) for k, v in own]
                inputs = self._inputs(batch.tokens[b, t + 1 + step], hidden)
                own.append(
                    (
                        self._rope(self._heads(attention.k_proj(inputs), shape.kv_heads), t + step),
                        self._heads(attention.v_proj(inputs), shape.kv_heads),
                    )
                )
            else:
                inputs = context[b, t]
            query = self._rope(self._heads(attention.q_proj(inputs), shape.heads), t + step)
            attended = self._attend(query, keys, values, own, b, t, first)
            normed, hidden = self._outputs(attended, hidden)
            yield StepOutput(self.lm_head(normed), b, t + 1 + step)

    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        if self.shape.fc_norm:
            parts = features.split(self.shape.hidden, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def _inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embeds = F.embedding(tokens, self._embedding)
        return torch.cat([self.midlayer.input_layernorm(embeds), self.midlayer.hidden_norm(hidden)], dim=-1)

    def _outputs(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the output layer reads, what the next step starts from)"""
        residual = self.midlayer.self_attn.o_proj(attended).float() + residual.float()
        hidden = self.midlayer.mlp(self.midlayer.post_attention_layernorm(residual)).float() + residual
        normed = self.norm(hidden)
        return normed, normed if self.shape.norm_output else hidden

    def _heads(self, x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(*x.shape[:-1], count, self.shape.head_dim)

    def _rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate ``[..., P, heads, head_dim]`` by ``positions [P]``."""
        half = self.shape.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float32, device=x.device) / half
        angles = positions.to(x.device)[:, None].float() * self.shape.rope_theta**-exponents
        cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
        left, right = x.float().split(half, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        own: Sequence[tuple[torch.Tensor, torch.Tensor]],
        b: torch.Tensor,
        t: torch.Tensor,
        first: int,
    ) -> torch.Tensor:
        """Rows attend the true context up to their position, and their own earlier steps.

        Args:
            query: ``[N, heads, head_dim]``.
            keys, values: ``[B, L, kv heads, head_dim]``.
            own: key and value ``[N, kv heads, head_dim]`` of each earlier step of the same rows.
            b, t: ``[N]`` example and position of each row.
            first: smallest position of any row.

        Returns:
            ``[N, heads * head_dim]``.

        """
        kv_heads, dim, scale = self.shape.kv_heads, self.shape.head_dim, self.shape.head_dim**-0.5
        group = self.shape.heads // kv_heads
        size = keys.shape[1] - first
        grid = query.new_zeros(keys.shape[0], size, kv_heads, group, dim)
        grid = grid.index_put((b, t - first), query.view(-1, kv_heads, group, dim))
        # [B, kv heads, size * group, L]
        scores = grid.permute(0, 2, 1, 3, 4).reshape(-1, kv_heads, size * group, dim) @ keys.permute(0, 2, 3, 1)
        scores = scores.view(-1, kv_heads, size, group, keys.shape[1]).permute(0, 2, 1, 3, 4)[b, t - first]
        later = torch.arange(keys.shape[1], device=t.device)[None, :] > t[:, None]
        scores = (scores.float() * scale).masked_fill(later[:, None, None, :], -torch.inf)  # [N, kv heads, group, L]
        grouped = query.view(-1, kv_heads, group, dim)
        if own:
            steps = torch.stack([(grouped * k[:, :, None, :]).sum(-1) for k, _ in own], dim=-1) * scale
            scores = torch.cat([scores, steps], dim=-1)
        weights = scores.softmax(-1)
        shared = weights[..., : keys.shape[1]]
        grid = shared.new_zeros(keys.shape[0], size, kv_heads, group, keys.shape[1]).index_put((b, t - first), shared)
        mixed = grid.permute(0, 2, 1, 3, 4).reshape(-1, kv_heads, size * group, keys.shape[1]) @ values.transpose(1, 2)
        out = mixed.view(-1, kv_heads, size, group, dim).permute(0, 2, 1, 3, 4)[b, t - first].float()
        for step, (_, value) in enumerate(own):
            out = out + weights[..., keys.shape[1] + step, None] * value[:, :, None, :]
        return out.reshape(len(t), -1)
