"""What can be known of a model before it is loaded: its sizes, and whether it is the same as another."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from adaptivespec_vllm.engine.head.weights import Tensors

_LEAST_KV_BYTES = 64 << 20
_SPARE_TOKENS = 128
"""Tokens of room behind the last one, so that no tree is cut short at the end of an answer."""
_BLOCK = 128
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ENDS = 1 << 20


def room(longest_prompt: int, max_tokens: int) -> int:
    """``max_model_len`` for such prompts and answers."""
    return -(-(longest_prompt + max_tokens + _SPARE_TOKENS) // _BLOCK) * _BLOCK


def element_bytes(dtype: str, config: Any) -> int:
    """Bytes of a number, of vLLM's ``dtype``; "auto" is what the configuration says."""
    own = str(getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)).removeprefix("torch.")
    return _ELEMENT_BYTES.get(dtype) or _ELEMENT_BYTES.get(own, 2)


def kv_cache_bytes(config: Any, tokens: int, element_bytes: int) -> int:
    """Keys and values of so many tokens in a target of this Hugging Face config and in its head of one layer."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    needed = 2 * (config.num_hidden_layers + 1) * heads * size * element_bytes * tokens
    return max(_LEAST_KV_BYTES, int(1.1 * needed))


def weight_bytes(directory: Path, element_bytes: int) -> int | None:
    """Memory of the weights of a directory when loaded; ``None`` where there are none to look at."""
    shapes = Tensors.read(sorted(directory.glob("*.safetensors"))).shapes.values()
    return sum(map(math.prod, shapes)) * element_bytes or None


def fingerprint(name: str) -> str:
    """Tells whether two models are the same: of a directory its configuration and the ends of its weight files."""
    directory = Path(name)
    if not directory.is_dir():
        return name
    state = hashlib.sha256()
    for file in sorted([*directory.glob("config.json"), *directory.glob("*.safetensors")]):
        size = file.stat().st_size
        with file.open("rb") as stream:
            state.update(f"{file.name} {size}".encode() + stream.read(_ENDS))
            stream.seek(max(0, size - _ENDS))
            state.update(stream.read(_ENDS))
    return f"{directory.resolve().name} {state.hexdigest()[:12]}"
