"""What an EAGLE-3 head directory holds, and whether it fits a target.

Only ``config.json``, the headers of the safetensors files and the small tensors are read; no model is built.
Both layouts are known: the EAGLE repository's (one flat config) and that of speculators (``speculators_config`` with
the layer's own config inside).

A reduced draft vocabulary needs the map ``d2t``, which holds offsets: ``target id = draft id + d2t[draft id]``. Without
it, or with zeros, nearly nothing would be accepted and nothing would say why, so such a head is refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError

from adaptivespec_vllm.config import ConfigError, shortened
from adaptivespec_vllm.engine import head_weights, seams
from adaptivespec_vllm.engine.head_weights import MAP_NAMES, Tensors

_DEFAULT_AUX_LAYERS = 3
_MAX_HUB_ID = 96
_MIN_WINDOW = 2


class HeadError(ConfigError):
    """A head that cannot be used, or does not fit the target."""


@dataclass(frozen=True)
class TargetFacts:
    """What a head must agree with."""

    vocab_size: int
    hidden_size: int
    layers: int

    @staticmethod
    def of_model_config(model_config: Any) -> TargetFacts:
        """From vLLM's ``ModelConfig``."""
        return TargetFacts(
            vocab_size=model_config.get_vocab_size(),
            hidden_size=model_config.get_hidden_size(),
            layers=model_config.get_total_num_hidden_layers(),
        )

    @staticmethod
    def of_directory(path: str | Path) -> TargetFacts | None:
        """From a local model's ``config.json``; None when it is not there or does not say."""
        try:
            config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
            text = config.get("text_config", config)
            return TargetFacts(text["vocab_size"], text["hidden_size"], text["num_hidden_layers"])
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return None


@dataclass(frozen=True)
class HeadFacts:
    """What is known of a head.

    Attributes:
        path: its directory.
        layout: whose layout it has.
        architecture: first entry of ``architectures``.
        aux_layers: target layers whose hidden states it reads; None leaves the choice to the target's class.
        aux_count: how many of them.
        hidden_size: its own width.
        target_hidden_size: width of each hidden state that it reads.
        layers: its decoder layers.
        vocab_size: target vocabulary it was made for.
        draft_vocab_size: tokens it can propose.
        vocab_map: ``present``, or where both vocabularies are the same: ``none``, or ``unused`` for one of zeros.
        window: positions it was made for.
        own_embedding: whether it brings token embeddings; otherwise it uses the target's.
        own_lm_head: whether it brings an output layer.

    """

    path: str
    layout: Literal["eagle", "speculators"]
    architecture: str
    aux_layers: tuple[int, ...] | None
    aux_count: int
    hidden_size: int
    target_hidden_size: int
    layers: int
    vocab_size: int
    draft_vocab_size: int
    vocab_map: Literal["present", "none", "unused"]
    window: int | None
    own_embedding: bool
    own_lm_head: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def install_loading() -> None:
    """Let vLLM load a head whose map is ``unused``; called by our worker, so only where our method was asked for."""
    for seam in seams.HEAD_LOADING:
        seams.Wrap(seam, _without_unused_map).install()


def _without_unused_map(original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Any]]) -> Any:
    """vLLM's class has no place for a map where both vocabularies are the same, and would fail on one."""
    if getattr(model, "draft_id_to_target_id", None) is None:
        weights = ((name, weight) for name, weight in weights if name.rpartition(".")[2] not in MAP_NAMES)
    return original(model, weights)


def check(model: str, target: TargetFacts | None = None) -> HeadFacts | None:
    """Facts of the head in directory ``model``, checked against the target.

    Returns None for what is not a local directory (a hub id): vLLM loads and checks that itself.

    Raises:
        HeadError: names the field that is wrong and what it should be.

    """
    if not _is_directory(model):
        if not may_be_hub_id(model):
            raise HeadError(f"model: {shortened(model, 240)}: no such directory")
        return None
    facts = inspect(model)
    if target is not None:
        _check_fit(facts, target)
    return facts


def may_be_hub_id(model: str) -> bool:
    """Whether a name that is no directory can still be a model's: an id of a hub, or an address."""
    if re.match(r"\w+://", model):
        return True
    return len(model) <= _MAX_HUB_ID and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model) is not None


def _is_directory(model: str) -> bool:
    try:
        return Path(model).is_dir()
    except (OSError, ValueError):  # a name that is too long
        return False


def inspect(path: str | Path) -> HeadFacts:
    """Facts of a head directory; everything that can be checked without the target is."""
    path = Path(path)
    config = _read_config(path)
    layout: Literal["eagle", "speculators"] = "speculators" if "speculators_config" in config else "eagle"
    layer = _layer_config(path, config, layout)
    tensors = _read_tensors(path)
    facts = _facts(path, config, layer, layout, tensors)
    _check_architecture(path, config, facts)
    _check_window(path, facts)
    _check_layer(path, facts, tensors)
    _check_map(path, facts, tensors)
    _check_weights(path, config, layer, facts, tensors)
    return facts


def _read_config(path: Path) -> dict[str, Any]:
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


def _layer_config(path: Path, config: dict[str, Any], layout: str) -> Mapping[str, Any]:
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


def _read_tensors(path: Path) -> Tensors:
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


def _facts(
    path: Path,
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    layout: Literal["eagle", "speculators"],
    tensors: Tensors,
) -> HeadFacts:
    hidden = _integer(path, layer, "hidden_size")
    vocab = _integer(path, layer, "vocab_size")
    draft_vocab = _integer(path, config, "draft_vocab_size", vocab)
    aux = _aux_layers(path, config, layer)
    target_hidden = _integer(path, config, "target_hidden_size", hidden)
    eagle = config.get("eagle_config") or {}
    uses_aux = eagle.get("use_aux_hidden_state", True) if isinstance(eagle, Mapping) else True
    count = len(aux) if aux else _integer(path, config, "num_aux_hidden_states", _DEFAULT_AUX_LAYERS)
    window = _integer(path, layer, "max_position_embeddings", 0)
    return HeadFacts(
        path=str(path),
        layout=layout,
        architecture=_architecture(path, config, layer, layout),
        aux_layers=aux,
        aux_count=count if uses_aux else 0,
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        layers=_integer(path, layer, "num_hidden_layers", 1),
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


def _integer(path: Path, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        shown = "missing" if value is None else f"{value!r}"
        raise HeadError(f"model: {path}: {key} is {shown} in config.json; allowed: an integer of at least 1")
    return value


def _check_layer(path: Path, facts: HeadFacts, tensors: Tensors) -> None:
    """The tensors are those of an EAGLE-3 head and have the sizes that the config says."""
    fc = tensors.find("fc.weight")
    if facts.aux_count and fc is None:
        raise HeadError(f"model: {path}: fc.weight is missing from its tensors, so it is not an EAGLE-3 head")
    if facts.aux_count and fc is not None:
        expected = (facts.hidden_size, facts.target_hidden_size * facts.aux_count)
        if tensors.shapes[fc] != expected:
            raise HeadError(
                f"model: {path}: {fc} has shape {tensors.shapes[fc]}; {expected} follows from hidden_size "
                f"{facts.hidden_size} and {facts.aux_count} auxiliary layers of {facts.target_hidden_size}"
            )
    projections = ("self_attn.q_proj.weight", "self_attn.qkv_proj.weight")
    query = tensors.find(*(f"{layer}.{name}" for layer in ("midlayer", "layers.0") for name in projections))
    if query is not None and tensors.shapes[query][-1] != 2 * facts.hidden_size:
        raise HeadError(
            f"model: {path}: {query} reads {tensors.shapes[query][-1]} values; an EAGLE-3 layer reads "
            f"2 * hidden_size = {2 * facts.hidden_size} (token embedding beside hidden state)"
        )
    for name, rows in (("lm_head.weight", facts.draft_vocab_size), ("embed_tokens.weight", facts.vocab_size)):
        tensor = tensors.find(name)
        if tensor is not None and tensors.shapes[tensor] != (rows, facts.hidden_size):
            raise HeadError(
                f"model: {path}: {tensor} has shape {tensors.shapes[tensor]}; config.json says "
                f"({rows}, {facts.hidden_size})"
            )
    if facts.draft_vocab_size != facts.vocab_size and not facts.own_lm_head:
        raise HeadError(
            f"model: {path}: lm_head.weight is missing from its tensors; draft_vocab_size {facts.draft_vocab_size} "
            "needs one"
        )


def _check_architecture(path: Path, config: Mapping[str, Any], facts: HeadFacts) -> None:
    """vLLM has a class for it; left to vLLM where that cannot be asked."""
    try:
        known = seams.SUPPORTED_MODELS.resolve()()
    except Exception:  # importing vLLM can fail in any way
        return
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if facts.layout == "eagle" and not any(head_weights.vllm_name(name) in known for name in names):
        raise HeadError(
            f"model: {path}: architectures is {shortened(names[0])!r}; allowed: an EAGLE-3 head that vLLM knows, "
            "as 'LlamaForCausalLMEagle3' or 'Eagle3Qwen3ForCausalLM'"
        )


def _check_window(path: Path, facts: HeadFacts) -> None:
    if facts.window is not None and facts.window < _MIN_WINDOW:
        raise HeadError(
            f"model: {path}: max_position_embeddings is {facts.window}, so nothing would be drafted; "
            f"allowed: an integer of at least {_MIN_WINDOW}"
        )


def _check_weights(
    path: Path, config: Mapping[str, Any], layer: Mapping[str, Any], facts: HeadFacts, tensors: Tensors
) -> None:
    """Every tensor of the layers is there, of the shape that the config says, and holds numbers."""
    kind = _kind(facts, layer)
    if kind is None:
        return
    layout = _layout(path, config, layer, facts, qwen3=kind == "qwen3")
    if head_weights.is_quantized(config, layer):
        return
    for fault in head_weights.faults(layout, tensors):
        raise HeadError(f"model: {path}: {fault}")


def _kind(facts: HeadFacts, layer: Mapping[str, Any]) -> str | None:
    if facts.layout == "speculators":
        kind = layer.get("model_type", "llama")
        return kind if kind in ("llama", "qwen3") else None
    return head_weights.kind_of(facts.architecture)


def _layout(
    path: Path, config: Mapping[str, Any], layer: Mapping[str, Any], facts: HeadFacts, *, qwen3: bool
) -> head_weights.Layout:
    heads = _integer(path, layer, "num_attention_heads")
    kv_heads = _integer(path, layer, "num_key_value_heads", None if qwen3 else heads)
    stated = layer.get("head_dim")
    of_class = layer.get("model_type") if facts.layout == "eagle" else None
    if stated is None and of_class == "qwen3":
        stated = 128  # the default of its configuration class
    if (stated is None or of_class == "llama") and facts.hidden_size % heads:
        raise HeadError(
            f"model: {path}: num_attention_heads is {heads}; hidden_size {facts.hidden_size} is not a multiple of it"
        )
    if heads % kv_heads:
        raise HeadError(
            f"model: {path}: num_key_value_heads is {kv_heads}; num_attention_heads {heads} is not a multiple of it"
        )
    if layer.get("num_hidden_layers") is None:
        _integer(path, layer, "num_hidden_layers")
    eagle = layer.get("eagle_config")
    eagle = eagle if isinstance(eagle, Mapping) else {}
    bias = bool(layer.get("attention_bias"))
    return head_weights.Layout(
        qwen3=qwen3,
        hidden=facts.hidden_size,
        layers=facts.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_integer(path, {"head_dim": stated}, "head_dim", facts.hidden_size // heads),
        intermediate=_integer(path, layer, "intermediate_size"),
        vocab=facts.vocab_size,
        draft_vocab=facts.draft_vocab_size,
        fc_input=facts.target_hidden_size * (facts.aux_count or _DEFAULT_AUX_LAYERS),
        aux=facts.aux_count,
        norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm")),
        attention_bias=bias,
        o_proj_bias=not qwen3 and (bias or bool(layer.get("bias"))),
        mlp_bias=not qwen3 and bool(layer.get("mlp_bias")),
    )


def _check_map(path: Path, facts: HeadFacts, tensors: Tensors) -> None:
    """``draft id + d2t[draft id]`` is a different id of the target's vocabulary for every draft id."""
    name = tensors.find(*MAP_NAMES)
    draft, vocab = facts.draft_vocab_size, facts.vocab_size
    if draft > vocab:
        raise HeadError(f"model: {path}: draft_vocab_size is {draft}; allowed: at most vocab_size {vocab}")
    if name is None:
        if draft != vocab:
            raise HeadError(
                f"model: {path}: d2t is missing from its tensors; a head with draft_vocab_size {draft} of {vocab} "
                "needs this map from draft to target ids"
            )
        return
    if tensors.shapes[name] != (draft,) or not tensors.is_integer(name):
        raise HeadError(
            f"model: {path}: {name} has shape {tensors.shapes[name]} of {tensors.dtype(name)}; allowed: {draft} "
            "integers (draft_vocab_size)"
        )
    offsets = tensors.load(name)
    if not offsets.any():
        if draft != vocab:
            raise HeadError(
                f"model: {path}: {name} holds only zeros; a head with draft_vocab_size {draft} of {vocab} needs the "
                "offsets target id - draft id"
            )
        return
    if draft == vocab:
        raise HeadError(
            f"model: {path}: {name} holds offsets although draft_vocab_size is the whole vocabulary of {vocab}; "
            "allowed: none, or zeros"
        )
    targets = np.arange(draft, dtype=np.int64) + offsets.astype(np.int64)
    outside = np.flatnonzero((targets < 0) | (targets >= vocab))
    if outside.size:
        first = int(outside[0])
        raise HeadError(
            f"model: {path}: {name}[{first}] maps to target id {int(targets[first])} ({outside.size} such entries); "
            f"allowed: 0 to {vocab - 1}, as draft id + offset"
        )
    unique = np.unique(targets).size
    if unique != draft:
        raise HeadError(
            f"model: {path}: {name} maps {draft} draft ids to {unique} target ids; each needs its own (the map holds "
            "offsets, not ids)"
        )


def _check_fit(facts: HeadFacts, target: TargetFacts) -> None:
    pairs = (
        ("vocab_size", facts.vocab_size, target.vocab_size),
        ("target_hidden_size", facts.target_hidden_size, target.hidden_size),
    )
    for field, ours, theirs in pairs:
        if ours != theirs:
            name = "hidden_size" if field == "target_hidden_size" and facts.hidden_size == ours else field
            raise HeadError(f"model: {facts.path}: {name} is {ours}; the target's is {theirs}")
    if not facts.own_embedding and facts.hidden_size != target.hidden_size:
        raise HeadError(
            f"model: {facts.path}: hidden_size is {facts.hidden_size}; without embed_tokens.weight of its own it must "
            f"be the target's {target.hidden_size}"
        )
    beyond = [layer for layer in facts.aux_layers or () if layer > target.layers]
    if beyond:
        raise HeadError(
            f"model: {facts.path}: eagle_aux_hidden_state_layer_ids names layer {beyond[0]}; the target has "
            f"{target.layers} layers"
        )
