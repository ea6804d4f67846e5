"""A trained head as a directory that vLLM loads: in the layout of the EAGLE repository, or in that of speculators."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from adaptivespec_vllm.training.network import HeadShape
from adaptivespec_vllm.training.vocabulary import DraftVocabulary

Layout = Literal["eagle", "speculators"]


@dataclass(frozen=True)
class TrainedHead:
    """A head and all that a loader must know of it.

    Attributes:
        state: its tensors, by the names of the EAGLE layout.
        shape: its sizes.
        vocabulary: what it can propose.
        layers: target layers whose inputs it reads.
        target: the target's config, as a plain dict.
        target_name: what the target is called.
        unrolled: draft steps that it was trained for.

    """

    state: dict[str, torch.Tensor]
    shape: HeadShape
    vocabulary: DraftVocabulary
    layers: Sequence[int]
    target: dict[str, Any]
    target_name: str
    unrolled: int


def export(head: TrainedHead, directory: Path, layout: Layout = "eagle") -> None:
    """Write the head, in bfloat16; a directory of that name is replaced only by a complete one."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    state = {name: value.to(torch.bfloat16).contiguous() for name, value in head.state.items()}
    if layout == "speculators":
        state = {name.replace("midlayer.", "layers.0."): value for name, value in state.items()}
    state |= {"d2t": head.vocabulary.d2t, "t2d": head.vocabulary.t2d}
    save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
    os.chmod(partial / "model.safetensors", 0o644)  # safetensors writes for the owner alone
    config = _eagle_config(head) if layout == "eagle" else _speculators_config(head)
    (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)


def _layer_config(head: TrainedHead) -> dict[str, Any]:
    shape, target = head.shape, head.target
    config = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": head.vocabulary.target_size,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": target["max_position_embeddings"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    return config | {key: target[key] for key in ("bos_token_id", "eos_token_id") if target.get(key) is not None}


def _head_config(head: TrainedHead) -> dict[str, Any]:
    return {
        "draft_vocab_size": len(head.vocabulary.ids),
        "fc_norm": head.shape.fc_norm,
        "norm_output": head.shape.norm_output,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(head.layers),
    }


def _eagle_config(head: TrainedHead) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "torch_dtype": "bfloat16",
        **_layer_config(head),
        **_head_config(head),
    }


def _speculators_config(head: TrainedHead) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "torch_dtype": "bfloat16",
        **_head_config(head),
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **_layer_config(head)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": head.unrolled}],
            "verifier": {"name_or_path": head.target_name, "architectures": head.target["architectures"]},
        },
    }
