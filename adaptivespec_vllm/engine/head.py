"""What an EAGLE-3 head directory holds, and whether it fits a target.

Only ``config.json``, the headers of the safetensors files and the small vocabulary map are read; no model is built.
Both layouts are known: the EAGLE repository's (one flat config) and that of speculators (``speculators_config`` with
the layer's own config inside).

A reduced draft vocabulary needs the map ``d2t``, which holds offsets: ``target id = draft id + d2t[draft id]``. Without
it, or with zeros, nearly nothing would be accepted and nothing would say why, so such a head is refused.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.engine import seams

_MAP_NAMES = ("d2t", "draft_id_to_target_id")
_DEFAULT_AUX_LAYERS = 3


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
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
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


@dataclass(frozen=True)
class _Tensors:
    """Shapes of all tensors, and the file of each."""

    shapes: dict[str, tuple[int, ...]]
    files: dict[str, Path]

    def find(self, *endings: str) -> str | None:
        """Name of the first tensor that is, or ends with a part that is, one of ``endings``."""
        for ending in endings:
            for name in self.shapes:
                if name == ending or name.endswith(f".{ending}"):
                    return name
        return None

    def load(self, name: str) -> np.ndarray[Any, Any]:
        with safe_open(self.files[name], framework="numpy") as file:
            return np.asarray(file.get_tensor(name))


def install_loading() -> None:
    """Let vLLM load a head whose map is ``unused``; called by our worker, so only where our method was asked for."""
    for seam in seams.HEAD_LOADING:
        seams.Wrap(seam, _without_unused_map).install()


def _without_unused_map(original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Any]]) -> Any:
    """vLLM's class has no place for a map where both vocabularies are the same, and would fail on one."""
    if getattr(model, "draft_id_to_target_id", None) is None:
        weights = ((name, weight) for name, weight in weights if name.rpartition(".")[2] not in _MAP_NAMES)
    return original(model, weights)


def check(model: str, target: TargetFacts | None = None) -> HeadFacts | None:
    """Facts of the head in directory ``model``, checked against the target.

    Returns None for what is not a local directory (a hub id): vLLM loads and checks that itself.

    Raises:
        HeadError: names the field that is wrong and what it should be.

    """
    if not Path(model).is_dir():
        if model.startswith(("/", "./", "../", "~")):
            raise HeadError(f"model: {model}: no such directory")
        return None
    facts = inspect(model)
    if target is not None:
        _check_fit(facts, target)
    return facts


def inspect(path: str | Path) -> HeadFacts:
    """Facts of a head directory; everything that can be checked without the target is."""
    path = Path(path)
    config = _read_config(path)
    layout: Literal["eagle", "speculators"] = "speculators" if "speculators_config" in config else "eagle"
    layer = _layer_config(path, config, layout)
    tensors = _read_tensors(path)
    facts = _facts(path, config, layer, layout, tensors)
    _check_layer(path, facts, tensors)
    _check_map(path, facts, tensors)
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
    except (OSError, UnicodeDecodeError) as error:
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


def _read_tensors(path: Path) -> _Tensors:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        others = sorted(entry.name for pattern in ("*.bin", "*.pt", "*.pth") for entry in path.glob(pattern))
        found = f"only {', '.join(others)}" if others else "no weights"
        raise HeadError(f"model: {path}: holds {found}; needed: *.safetensors (convert it once)")
    shapes: dict[str, tuple[int, ...]] = {}
    origin: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
                    origin[name] = file
        except (SafetensorError, OSError) as error:
            raise HeadError(f"model: {file}: not a readable safetensors file ({error})") from None
    return _Tensors(shapes, origin)


def _facts(
    path: Path,
    config: Mapping[str, Any],
    layer: Mapping[str, Any],
    layout: Literal["eagle", "speculators"],
    tensors: _Tensors,
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


def _map_use(draft_vocab: int, vocab: int, tensors: _Tensors) -> Literal["present", "none", "unused"]:
    if draft_vocab != vocab:
        return "present"
    return "none" if tensors.find(*_MAP_NAMES) is None else "unused"


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


def _check_layer(path: Path, facts: HeadFacts, tensors: _Tensors) -> None:
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
    query = tensors.find("self_attn.q_proj.weight", "self_attn.qkv_proj.weight")
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


def _check_map(path: Path, facts: HeadFacts, tensors: _Tensors) -> None:
    """``draft id + d2t[draft id]`` is a different id of the target's vocabulary for every draft id."""
    name = tensors.find(*_MAP_NAMES)
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
    offsets = tensors.load(name)
    if offsets.shape != (draft,) or offsets.dtype.kind not in "iu":
        raise HeadError(
            f"model: {path}: {name} has shape {offsets.shape} of {offsets.dtype}; allowed: {draft} integers "
            "(draft_vocab_size)"
        )
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
