"""A tiny target and a head for it, made on the fly: enough for everything that happens before weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, LAYERS, VOCAB, DRAFT_VOCAB = 64, 4, 512, 128
INTERMEDIATE, QUERY, KEY = 128, 64, 32
"""Width of the MLP, of all queries (4 heads of 16) and of all keys (2 heads of 16)."""


def write_target(path: Path, **changes: Any) -> str:
    """A Llama configuration directory without weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    }
    return _write_config(path, config | changes)


def write_head(path: Path, tensors: dict[str, np.ndarray | None] | None = None, **changes: Any) -> str:
    """An EAGLE-3 head for it; ``tensors`` replaces some, None removes one."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    held = head_tensors() | (tensors or {})
    _write_config(path, {key: value for key, value in (config | changes).items() if value is not None})
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, path / "model.safetensors")
    return str(path)


def head_tensors() -> dict[str, np.ndarray]:
    """Tensors of the head, all zeros but for the vocabulary map (every fourth target id)."""
    tensors = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    zeros = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    maps = {"d2t": 3 * np.arange(DRAFT_VOCAB, dtype=np.int64), "t2d": np.arange(VOCAB) % 4 == 0}
    return zeros | layer_tensors() | maps


def layer_tensors(prefix: str = "midlayer.", hidden: int = HIDDEN, *, first: bool = True) -> dict[str, np.ndarray]:
    """Tensors of one decoder layer; the first one reads the token's embedding beside the hidden state."""
    read = 2 * hidden if first else hidden
    shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (QUERY, read),
        "self_attn.k_proj.weight": (KEY, read),
        "self_attn.v_proj.weight": (KEY, read),
        "self_attn.o_proj.weight": (hidden, QUERY),
        "mlp.gate_proj.weight": (INTERMEDIATE, hidden),
        "mlp.up_proj.weight": (INTERMEDIATE, hidden),
        "mlp.down_proj.weight": (hidden, INTERMEDIATE),
    } | ({"hidden_norm.weight": (hidden,)} if first else {})
    return {f"{prefix}{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _write_config(path: Path, config: dict[str, Any]) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)
