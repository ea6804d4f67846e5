"""The tensors of an EAGLE-3 head: which there must be, of which shape, and whether they hold numbers.

vLLM loads what it finds: a tensor that is missing keeps its random values, one of another shape can be cut to size, and
the head then drafts badly or nothing without a word. Here each of these is one sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from adaptivespec_vllm.config import shortened

MAP_NAMES = ("d2t", "draft_id_to_target_id")

MAX_READ = 64 << 20
"""Bytes of the largest tensor that is read to look for NaN and infinity."""

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
_EXPONENTS = {"F64": (np.uint64, 0x7FF << 52), "F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00)}
_EXPONENTS["BF16"] = (np.uint16, 0x7F80)
"""Bits that are all set in infinity and NaN; numpy has no bfloat16."""

_LLAMA = {
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
}
_QWEN3 = {"Eagle3Qwen3ForCausalLM"}
_SKIPPED = ("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@dataclass(frozen=True)
class Tensors:
    """Shape and kind of all tensors, and the file of each."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    files: dict[str, Path]

    @classmethod
    def read(cls, files: list[Path]) -> Tensors:
        """From the headers; raises SafetensorError or OSError."""
        tensors = cls({}, {}, {})
        for file in files:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(name)
                    tensors.shapes[name] = tuple(part.get_shape())
                    tensors.dtypes[name] = str(part.get_dtype())
                    tensors.files[name] = file
        return tensors

    def find(self, *endings: str) -> str | None:
        """Name of the first tensor that is, or ends with a part that is, one of ``endings``."""
        for ending in endings:
            for name in self.shapes:
                if name == ending or name.endswith(f".{ending}"):
                    return name
        return None

    def dtype(self, name: str) -> str:
        """The kind of a tensor's elements as numpy and torch call it."""
        kind = self.dtypes[name]
        return _DTYPES.get(kind) or re.sub(r"^([UI])(\d+)$", lambda m: f"{'u' * (m[1] == 'U')}int{m[2]}", kind)

    def is_integer(self, name: str) -> bool:
        return re.fullmatch(r"[UI]\d+", self.dtypes[name]) is not None

    def is_floating(self, name: str) -> bool:
        return self.dtypes[name].startswith(("F", "BF"))

    def load(self, name: str) -> np.ndarray[Any, Any]:
        with safe_open(self.files[name], framework="numpy") as file:
            return np.asarray(file.get_tensor(name))

    def finite(self, name: str) -> bool:
        """Whether a tensor holds numbers only; large ones and kinds that are not known are taken to."""
        known = _EXPONENTS.get(self.dtypes[name])
        if known is None:
            return True
        kind, exponent = known
        if int(np.prod(self.shapes[name])) * np.dtype(kind).itemsize > MAX_READ:
            return True
        bits = self._raw(name, np.dtype(kind))
        return not bool(((bits & kind(exponent)) == kind(exponent)).any())

    def _raw(self, name: str, kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
        with self.files[name].open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            begin, end = json.loads(file.read(size))[name]["data_offsets"]
            file.seek(8 + size + begin)
            return np.frombuffer(file.read(end - begin), kind)


@dataclass(frozen=True)
class Layout:
    """What the config says of the decoder layers."""

    qwen3: bool
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    fc_input: int
    aux: int
    norm_before_fc: bool
    fc_norm: bool
    attention_bias: bool
    o_proj_bias: bool
    mlp_bias: bool

    def required(self) -> dict[str, tuple[int, ...]]:
        """Tensors without which vLLM would compute with random values, by vLLM's names, with their shapes."""
        shapes: dict[str, tuple[int, ...]] = {"norm.weight": (self.hidden,)}
        if self.aux:
            shapes["fc.weight"] = (self.hidden, self.fc_input)
            if self.norm_before_fc:
                shapes["input_norm.weight"] = (self.fc_input,)
            if self.fc_norm:
                shapes |= {f"fc_norm.{index}.weight": (self.fc_input // self.aux,) for index in range(self.aux)}
        for layer in range(self.layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self._layer(layer).items()}
        return shapes

    def optional(self) -> dict[str, tuple[int, ...]]:
        """Tensors that a head may have beside them."""
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocab, self.hidden),
            "lm_head.weight": (self.draft_vocab, self.hidden),
        }
        for layer in range(1, self.layers):
            shapes[f"layers.{layer}.hidden_norm.weight"] = (self.hidden,)
        return shapes

    def _layer(self, layer: int) -> dict[str, tuple[int, ...]]:
        read = self.hidden * (2 if layer == 0 else 1)
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (query, read),
            "self_attn.k_proj.weight": (key, read),
            "self_attn.v_proj.weight": (key, read),
            "self_attn.o_proj.weight": (self.hidden, query),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        if layer == 0:
            shapes["hidden_norm.weight"] = (self.hidden,)
        if self.qwen3:
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        if self.attention_bias:
            shapes |= {"self_attn.q_proj.bias": (query,), "self_attn.k_proj.bias": (key,)}
            shapes["self_attn.v_proj.bias"] = (key,)
        if self.o_proj_bias:
            shapes["self_attn.o_proj.bias"] = (self.hidden,)
        if self.mlp_bias:
            shapes |= {"mlp.gate_proj.bias": (self.intermediate,), "mlp.up_proj.bias": (self.intermediate,)}
            shapes["mlp.down_proj.bias"] = (self.hidden,)
        return shapes


def kind_of(architecture: str) -> str | None:
    """``llama`` or ``qwen3``, whose class of vLLM loads it; None for another one."""
    name = vllm_name(architecture)
    return "llama" if name in _LLAMA else "qwen3" if name in _QWEN3 else None


def vllm_name(architecture: str) -> str:
    """The name under which vLLM looks for the class of a head."""
    if architecture.startswith("Eagle3") or architecture.endswith("Eagle3"):
        return architecture
    return f"Eagle3{architecture}"


def is_quantized(config: Mapping[str, Any], layer: Mapping[str, Any]) -> bool:
    """Whether the weights are stored in a form of their own, whose names and shapes are vLLM's business."""
    return any(part.get(key) for part in (config, layer) for key in ("quantization_config", "compression_config"))


def faults(layout: Layout, tensors: Tensors) -> Iterator[str]:
    """What is wrong with the tensors of a head that is not quantized, one sentence each."""
    names = _by_vllm_name(tensors)
    for name in tensors.shapes:
        if layout.draft_vocab != layout.vocab and name != "d2t" and ("d2t" in name or name in MAP_NAMES):
            yield f"{shortened(name)} is no name of a vocabulary map that vLLM knows; allowed: d2t"
    yield from _wrong_layers(layout, names)
    required = _fused(layout.required(), names)
    for name, expected in required.items():
        if name not in names:
            yield f"{_spelling(name, names)} is missing from its tensors"
        elif tensors.shapes[names[name]] != expected:
            yield _wrong_shape(names[name], tensors, expected)
    known = required | {name: shape for name, shape in layout.optional().items() if name not in required}
    dropped = ({"fc.weight"} if not layout.aux else set()) | ({"input_norm.weight"} - required.keys())
    for name, stored in names.items():
        if name in dropped:
            continue  # vLLM does not load it
        if name in known:
            if tensors.shapes[stored] != known[name]:
                yield _wrong_shape(stored, tensors, known[name])
            if not tensors.is_floating(stored):
                yield f"{stored} is of {tensors.dtype(stored)}; allowed: a floating point type"
        elif not name.endswith(".bias"):  # vLLM drops a bias that its layer does not have
            yield f"{shortened(stored)} is no tensor of an EAGLE-3 head; vLLM would fail on it"
    for name in known:
        stored = names.get(name, "")
        small = len(tensors.shapes.get(stored, ())) == 1 or name == "fc.weight"
        if stored and small and not tensors.finite(stored):
            yield f"{stored} holds values that are not finite numbers"


def _by_vllm_name(tensors: Tensors) -> dict[str, str]:
    """The stored name of each tensor that vLLM loads, by the name that vLLM gives it inside the model."""
    names = {}
    for stored in tensors.shapes:
        skipped = "t2d" in stored or "d2t" in stored or "mask_hidden" in stored
        if skipped or any(part in stored for part in _SKIPPED) or stored in MAP_NAMES:
            continue
        names[stored.replace("midlayer.", "layers.0.")] = stored
    return names


def _fused(required: dict[str, tuple[int, ...]], names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """``required`` with the fused form of projections where the head stores that."""
    groups = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    result = dict(required)
    for name in names:
        for fused, parts in groups.items():
            if f".{fused}." not in name:
                continue
            single = [name.replace(f".{fused}.", f".{part}.") for part in parts]
            if all(part in result for part in single):
                shapes = [result.pop(part) for part in single]
                result[name] = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return result


def _wrong_layers(layout: Layout, names: Mapping[str, str]) -> Iterator[str]:
    """The config and the tensors have the same number of layers."""
    found = {int(match[1]) for name in names if (match := re.match(r"layers\.(\d{1,6})\.", name))}
    if len(found) != layout.layers and (found or layout.layers > 1):
        yield f"num_hidden_layers is {layout.layers}; its tensors are those of {len(found)}"


def _spelling(name: str, names: Mapping[str, str]) -> str:
    """The name as this head would spell it."""
    if any(stored.startswith("midlayer.") for stored in names.values()):
        return name.replace("layers.0.", "midlayer.")
    return name


def _wrong_shape(stored: str, tensors: Tensors, expected: tuple[int, ...]) -> str:
    return f"{stored} has shape {tensors.shapes[stored]}; {expected} follows from config.json"
