"""A random Llama target and a random EAGLE-3 head, made on the fly: small enough that a step costs next to nothing.

Random models accept almost nothing of each other, so tests with them hide the true continuation in the drafts
(``oracle.py``).
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
DRAFT_VOCABULARY = 256
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 64, 128, 4, 2, 32, 4


def make_target(
    path: Path, *, architecture: str = "LlamaForCausalLM", max_len: int = 1024, vocabulary: int = VOCABULARY
) -> Path:
    """Write a random target; ``architecture`` may also be ``Qwen3ForCausalLM``."""
    generator = torch.Generator().manual_seed(7)

    def weight(*shape: int, scale: float = 0.08) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    q, kv = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    state = {
        # Large embeddings and head: flat distributions would be full of near-ties.
        "model.embed_tokens.weight": weight(vocabulary, HIDDEN, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": weight(vocabulary, HIDDEN, scale=0.5),
    }
    for i in range(LAYERS):
        prefix = f"model.layers.{i}"
        state |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": weight(q, HIDDEN, scale=0.2),
            f"{prefix}.self_attn.k_proj.weight": weight(kv, HIDDEN, scale=0.2),
            f"{prefix}.self_attn.v_proj.weight": weight(kv, HIDDEN, scale=0.2),
            f"{prefix}.self_attn.o_proj.weight": weight(HIDDEN, q, scale=0.2),
            f"{prefix}.mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
        }
        if architecture == "Qwen3ForCausalLM":
            state[f"{prefix}.self_attn.q_norm.weight"] = torch.ones(HEAD_SIZE)
            state[f"{prefix}.self_attn.k_norm.weight"] = torch.ones(HEAD_SIZE)
    config = {
        "architectures": [architecture],
        "model_type": "qwen3" if architecture == "Qwen3ForCausalLM" else "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return _write(path, config, state)


def make_head(
    path: Path, *, max_len: int = 1024, draft_vocabulary: int = DRAFT_VOCABULARY, vocabulary: int = VOCABULARY
) -> Path:
    """Write a random EAGLE-3 head for the target above."""
    generator = torch.Generator().manual_seed(8)

    def weight(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    q, kv = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    kept = torch.randperm(vocabulary, generator=generator)[:draft_vocabulary].sort().values
    state = {
        "fc.weight": weight(HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.self_attn.q_proj.weight": weight(q, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": weight(kv, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": weight(kv, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": weight(HIDDEN, q),
        "midlayer.mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": weight(draft_vocabulary, HIDDEN, scale=0.5),
    }
    if draft_vocabulary < vocabulary:
        state["d2t"] = kept - torch.arange(draft_vocabulary)
        state["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, kept, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "draft_vocab_size": draft_vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return _write(path, config, state)


def add_tokenizer(path: Path) -> Path:
    """Give a target a tokenizer: every printable ASCII character, and pairs of small letters up to the vocabulary."""
    special = ["<pad>", "<s>", "</s>"]
    space, newline = "\u0120", "\u010a"  # as byte-level tokenizers write them
    characters = [space, newline, *(chr(code) for code in range(33, 127))]
    pairs = list(itertools.product(string.ascii_lowercase, repeat=2))[: VOCABULARY - len(special) - len(characters)]
    tokens = [*special, *characters, *(first + second for first, second in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def _write(path: Path, config: dict, state: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path
