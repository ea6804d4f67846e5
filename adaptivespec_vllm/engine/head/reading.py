"""A head directory's config and tensors as facts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from adaptivespec_vllm.engine.head.facts import HeadError, HeadFacts
from adaptivespec_vllm.engine.head.weights import MAP_NAMES, Tensors

DEFAULT_AUX_LAYERS = 3


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadError(f"model: {path}: has no config.json, so it is not an EAGLE-3 head") from None
    except json.JSONDecodeError as error:
        raise HeadError(
            f"model: {file}: invalid JSON at line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise HeadError(f"model: {file}: nested too deeply") from None
    except (OSError, ValueError) as error:  # not UTF-8, or a number of thousands of digits
        raise HeadError(f"model: {file}: cannot be read ({error})") from None
    if not isinstance(config, dict):
        raise HeadError(f"model: {file}: not a JSON object")
    return config


def layer_config(path: Path, config: dict[str, Any], layout: str) -> Mapping[str, Any]:
    """The part of the config that describes the decoder layer."""
    if layout == "eagle":
        return config
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise HeadError(f"model: {path}: speculators_model_type is {kind!r}; allowed: 'eagle3'")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise HeadError(f"model: {path}: transformer_layer_config is missing from config.json")
    return layer


def read_tensors(path: Path) -> Tensors:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        others = sorted(entry.name for pattern in ("*.bin", "*.pt", "*.pth") for entry in path.glob(pattern))
        found = f"only {', '.join(others)}" if others else "no weights"
        raise HeadError(f"model: {path}: holds {found}; needed: *.safetensors (convert it once)")
    for file in files:
        try:
            Tensors.read([file])
        except (SafetensorError, OSError) as error:
            raise HeadError(f"model: {file}: not a readable safetensors file ({error})") from None
    return Tensors.read(files)


def facts_of(
    path: Path,
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    layout: Literal["eagle", "speculators"],
    tensors: Tensors,
) -> HeadFacts:
    hidden = integer(path, layer, "hidden_size")
    vocab = integer(path, layer, "vocab_size")
    draft_vocab = integer(path, config, "draft_vocab_size", vocab)
    aux = _aux_layers(path, config, layer)
    target_hidden = integer(path, config, "target_hidden_size", hidden)
    eagle = config.get("eagle_config") or {}
    uses_aux = eagle.get("use_aux_hidden_state", True) if isinstance(eagle, Mapping) else True
    count = len(aux) if aux else integer(path, config, "num_aux_hidden_states", DEFAULT_AUX_LAYERS)
    window = integer(path, layer, "max_position_embeddings", 0)
    return HeadFacts(
        path=str(path),
        layout=layout,
        architecture=_architecture(path, config, layer, layout),
        aux_layers=aux,
        aux_count=count if uses_aux else 0,
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        layers=integer(path, layer, "num_hidden_layers", 1),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        vocab_map=_map_use(draft_vocab, vocab, tensors),
        window=window or None,
        own_embedding=tensors.find("embed_tokens.weight") is not None,
        own_lm_head=tensors.find("lm_head.weight") is not None,
    )


def _map_use(draft_vocab: int, vocab: int, tensors: Tensors) -> Literal["present", "none", "unused"]:
    if draft_vocab != vocab:
        return "present"
    return "none" if tensors.find(*MAP_NAMES) is None else "unused"


def _architecture(path: Path, config: Mapping[str, Any], layer: Mapping[str, Any], layout: str) -> str:
    names = config.get("architectures")
    if layout == "speculators" and not names:
        return f"eagle3 ({layer.get('model_type', 'llama')})"
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise HeadError(f"model: {path}: architectures is missing from config.json")
    if "peagle" in names[0].lower():
        raise HeadError(f"model: {path}: architectures is {names[0]!r}, a parallel drafter; allowed: an EAGLE-3 head")
    return names[0]


def _aux_layers(path: Path, config: Mapping[str, Any], layer: Mapping[str, Any]) -> tuple[int, ...] | None:
    name = "eagle_aux_hidden_state_layer_ids"
    eagle = config.get("eagle_config")
    value = config.get(name) or layer.get(name)
    if not value and isinstance(eagle, Mapping):
        value = eagle.get(name)
    if not value:
        return None
    whole = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    if not whole or any(a >= b for a, b in itertools.pairwise(value)):
        raise HeadError(f"model: {path}: {name} is {value!r}; allowed: ascending layer numbers")
    return tuple(value)


def integer(path: Path, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        shown = "missing" if value is None else f"{value!r}"
        raise HeadError(f"model: {path}: {key} is {shown} in config.json; allowed: an integer of at least 1")
    return value
