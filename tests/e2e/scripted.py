"""A target that says what a script says, and a head that drafts it as far as a tree goes.

Random models never call a tool or end a thought. Here each token leads to the next one: embeddings are one-hot, layers
add nothing, and the output layer holds what follows each token. So a token may stand in one place of one script; what a
script says is cut into pieces that no other has. A place may have second and third choices, for when a grammar forbids
the first. The head knows the last hidden state but one, and walks on along first choices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, pre_tokenizers

from tests.e2e import tiny

ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
HEADS, HEAD_SIZE, LAYERS = 4, 32, 4
EOS = "</s>"

Scripts = Mapping[str, Sequence[str]]
"""By the last character of the prompt, the pieces of a text; :data:`EOS` ends it."""


class Script:
    """Which token follows which: token ids of all pieces, and the choices behind each, best first."""

    def __init__(self, tokenizer: Path, scripts: Scripts, choices: Mapping[str, Sequence[str]]) -> None:
        self.ids = Tokenizer.from_file(str(tokenizer)).get_vocab()
        self.pieces: list[str] = []
        for token in ADDED:
            self._add(token)
        self.following: dict[int, list[int]] = {}
        for start, pieces in scripts.items():
            for before, piece in zip([start, *pieces], pieces, strict=False):
                self._follow(before, piece)
        for before, others in choices.items():
            for piece in others:
                self._follow(before, piece)

    def _follow(self, before: str, piece: str) -> None:
        self._add(before)
        self._add(piece)
        self.following.setdefault(self.ids[before], []).append(self.ids[piece])

    def _add(self, piece: str) -> None:
        if piece not in self.ids:
            self.ids[piece] = len(self.ids)
            self.pieces.append(piece)

    def add_to_tokenizer(self, target: Path) -> None:
        """No text is ever cut into these tokens but the added ones: prompts are read in characters and pairs."""
        file = target / "tokenizer.json"
        state = json.loads(file.read_text())
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        for piece in self.pieces:
            ((encoded, _),) = as_bytes.pre_tokenize_str(piece)
            state["model"]["vocab"][encoded] = self.ids[piece]
        tokenizer = Tokenizer.from_str(json.dumps(state))
        tokenizer.add_tokens(ADDED)
        tokenizer.save(str(file))
        settings = target / "tokenizer_config.json"
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))


def make_scripted(
    target: Path, head: Path, scripts: Scripts, choices: Mapping[str, Sequence[str]] | None = None
) -> Script:
    """Write a target with its tokenizer, and its head.

    Args:
        target: directory of the target.
        head: directory of the head.
        scripts: what it says.
        choices: by piece, what else may follow it, best first.

    """
    target.mkdir(parents=True)
    tiny.add_tokenizer(target)
    script = Script(target / "tokenizer.json", scripts, choices or {})
    script.add_to_tokenizer(target)
    width = -(-len(script.ids) // 64) * 64
    leads = torch.zeros(width, width)  # [token, token before]
    for before, following in script.following.items():
        for place, token in enumerate(following):
            leads[token, before] = 1.0 - 0.1 * place
    best = torch.zeros_like(leads)
    for before, (token, *_) in script.following.items():
        best[token, before] = 1.0
    _write(target, width, LAYERS, _target_weights(width, leads))
    _write(head, width, 1, _head_weights(width, leads, best))
    return script


def _layer(prefix: str, width: int, inputs: int) -> dict[str, torch.Tensor]:
    """A decoder layer that adds nothing."""
    heads = HEADS * HEAD_SIZE
    return {
        f"{prefix}.input_layernorm.weight": torch.ones(width),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(width),
        f"{prefix}.self_attn.q_proj.weight": torch.zeros(heads, inputs),
        f"{prefix}.self_attn.k_proj.weight": torch.zeros(heads, inputs),
        f"{prefix}.self_attn.v_proj.weight": torch.zeros(heads, inputs),
        f"{prefix}.self_attn.o_proj.weight": torch.zeros(width, heads),
        f"{prefix}.mlp.gate_proj.weight": torch.zeros(width, width),
        f"{prefix}.mlp.up_proj.weight": torch.zeros(width, width),
        f"{prefix}.mlp.down_proj.weight": torch.zeros(width, width),
    }


def _target_weights(width: int, leads: torch.Tensor) -> dict[str, torch.Tensor]:
    state = {
        "model.embed_tokens.weight": torch.eye(width),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": leads,
    }
    for number in range(LAYERS):
        state |= _layer(f"model.layers.{number}", width, width)
    return state


def _head_weights(width: int, leads: torch.Tensor, best: torch.Tensor) -> dict[str, torch.Tensor]:
    """The MLP takes a one-hot state one token on: the norm makes it ``sqrt(width)`` large, silu(x) x its square."""
    state = _layer("midlayer", width, 2 * width) | {
        "midlayer.hidden_norm.weight": torch.ones(width),
        "norm.weight": torch.ones(width),
        "fc.weight": torch.cat([torch.eye(width), torch.zeros(width, 2 * width)], dim=1),
        "lm_head.weight": leads,
    }
    state["midlayer.mlp.gate_proj.weight"] = state["midlayer.mlp.up_proj.weight"] = torch.eye(width)
    return state | {"midlayer.mlp.down_proj.weight": (best - torch.eye(width)) / width}


def _write(path: Path, width: int, layers: int, state: dict[str, torch.Tensor]) -> None:
    head = layers == 1
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if head else "LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": width,
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    if head:
        config |= {"draft_vocab_size": width, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    tiny._write(path, config, {name: tensor.clone() for name, tensor in state.items()})
