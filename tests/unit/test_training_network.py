"""The head as it is trained computes what it computes when it drafts: checked against one draft at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from adaptivespec_vllm.training.features import Example
from adaptivespec_vllm.training.network import Batch, Eagle3Network, HeadShape

VOCABULARY = 40
SHAPES = {
    "normed": HeadShape(16, 24, 4, 2, 8, 10000.0, 1e-5, 12),
    "plain": HeadShape(16, 24, 4, 2, 8, 10000.0, 1e-5, 12, fc_norm=False, norm_output=False),
}


def make_network(shape: HeadShape) -> Eagle3Network:
    torch.manual_seed(3)
    network = Eagle3Network(shape, torch.randn(VOCABULARY, shape.hidden))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return network


def make_examples(shape: HeadShape, lengths: list[tuple[int, int]]) -> list[Example]:
    generator = torch.Generator().manual_seed(5)
    return [
        Example(
            torch.randint(VOCABULARY, (prompt + answer,), generator=generator),
            torch.randn(prompt + answer, 3 * shape.hidden, generator=generator),
            torch.randn(prompt + answer, shape.hidden, generator=generator),
            prompt,
        )
        for prompt, answer in lengths
    ]


class OneDraft:
    """One chain drafted behind position t of one text, row by row, as an engine would."""

    def __init__(self, network: Eagle3Network, example: Example) -> None:
        self.network, self.example = network, example
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def row(self, token: int, hidden: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, hidden state handed on)"""
        shape, layer = self.network.shape, self.network.midlayer
        embed = self.network._embedding[token]
        x = torch.cat([norm(layer.input_layernorm, embed), norm(layer.hidden_norm, hidden)])
        heads = {name: getattr(layer.self_attn, f"{name}_proj").weight @ x for name in ("q", "k", "v")}
        query = rotate(heads["q"].view(shape.heads, -1), position, shape)
        self.keys.append(rotate(heads["k"].view(shape.kv_heads, -1), position, shape))
        self.values.append(heads["v"].view(shape.kv_heads, -1))
        out = []
        for head in range(shape.heads):
            of = head // (shape.heads // shape.kv_heads)
            scores = torch.stack([query[head] @ key[of] for key in self.keys]) / shape.head_dim**0.5
            out.append(scores.softmax(0) @ torch.stack([value[of] for value in self.values]))
        hidden = layer.self_attn.o_proj.weight @ torch.cat(out) + hidden
        inner = norm(layer.post_attention_layernorm, hidden)
        mlp = layer.mlp
        hidden = mlp.down_proj.weight @ (F.silu(mlp.gate_proj.weight @ inner) * (mlp.up_proj.weight @ inner)) + hidden
        normed = norm(self.network.norm, hidden)
        return self.network.lm_head.weight @ normed, normed if shape.norm_output else hidden

    def fused(self, position: int) -> torch.Tensor:
        features = self.example.features[position]
        if self.network.shape.fc_norm:
            parts = features.split(self.network.shape.hidden)
            features = torch.cat([norm(m, p) for m, p in zip(self.network.fc_norm, parts, strict=True)])
        return self.network.fc.weight @ features

    def chain(self, t: int, count: int) -> list[torch.Tensor]:
        """Logits of ``count`` drafts; the context is positions 0..t."""
        tokens = self.example.tokens.tolist()
        logits = []
        for position in range(t + 1):
            out, hidden = self.row(tokens[position + 1], self.fused(position), position)
        logits.append(out)
        for step in range(1, count):
            out, hidden = self.row(tokens[t + 1 + step], hidden, t + step)
            logits.append(out)
        return logits


def norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * module.weight


def rotate(x: torch.Tensor, position: int, shape: HeadShape) -> torch.Tensor:
    half = shape.head_dim // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position / shape.rope_theta ** (i / half))
        out[:, i] = x[:, i] * angle.cos() - x[:, i + half] * angle.sin()
        out[:, i + half] = x[:, i + half] * angle.cos() + x[:, i] * angle.sin()
    return out


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_steps_are_what_single_drafts_compute(name: str) -> None:
    shape = SHAPES[name]
    network = make_network(shape)
    examples = make_examples(shape, [(3, 6), (1, 4), (5, 9)])
    seen = 0
    for step, output in enumerate(network.steps(Batch.of(examples), 4)):
        for logits, b, at in zip(output.logits, output.b.tolist(), output.at.tolist(), strict=True):
            t = at - 1 - step
            expected = OneDraft(network, examples[b]).chain(t, step + 1)[-1]
            torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
            seen += 1
    # An answer of A tokens has A - 1 rows at depth 1 (drafting its tokens 2..A), and one less a depth.
    assert seen == sum(max(0, answer - 1 - step) for _, answer in [(3, 6), (1, 4), (5, 9)] for step in range(4))


@torch.no_grad()
def test_rows_left_out_change_no_other_row() -> None:
    shape = SHAPES["normed"]
    network, examples = make_network(shape), make_examples(shape, [(3, 20), (2, 15)])
    everything = [
        {(b, at): row for row, b, at in zip(o.logits, o.b.tolist(), o.at.tolist(), strict=True)}
        for o in network.steps(Batch.of(examples), 3)
    ]
    some = list(network.steps(Batch.of(examples), 3, keep=0.5, seed=1))
    assert len(some[0].b) == len(everything[0])
    assert 0 < len(some[2].b) < len(some[1].b) < len(everything[1])
    for step, output in enumerate(some):
        for row, b, at in zip(output.logits, output.b.tolist(), output.at.tolist(), strict=True):
            torch.testing.assert_close(row, everything[step][b, at], rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing() -> None:
    shape = SHAPES["normed"]
    network, examples = make_network(shape), make_examples(shape, [(3, 5), (4, 30)])
    alone = next(network.steps(Batch.of(examples[:1]), 1))
    padded = next(network.steps(Batch.of(examples), 1))
    torch.testing.assert_close(padded.logits[padded.b == 0], alone.logits, rtol=1e-4, atol=1e-4)
