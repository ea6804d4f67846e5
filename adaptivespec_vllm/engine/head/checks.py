"""Whether a head can be used, and with a target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from adaptivespec_vllm.config import shortened
from adaptivespec_vllm.engine import seams
from adaptivespec_vllm.engine.head import weights
from adaptivespec_vllm.engine.head.facts import HeadError, HeadFacts, TargetFacts
from adaptivespec_vllm.engine.head.layout import check_layer, check_weights
from adaptivespec_vllm.engine.head.reading import facts_of, layer_config, read_config, read_tensors
from adaptivespec_vllm.engine.head.vocabulary import check_map

_MAX_HUB_ID = 96
_MIN_WINDOW = 2


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
    config = read_config(path)
    layout: Literal["eagle", "speculators"] = "speculators" if "speculators_config" in config else "eagle"
    layer = layer_config(path, config, layout)
    tensors = read_tensors(path)
    facts = facts_of(path, config, layer, layout, tensors)
    _check_architecture(path, config, facts)
    _check_window(path, facts)
    check_layer(path, facts, tensors)
    check_map(path, facts, tensors)
    check_weights(path, config, layer, facts, tensors)
    return facts


def _check_architecture(path: Path, config: Mapping[str, Any], facts: HeadFacts) -> None:
    """vLLM has a class for it; left to vLLM where that cannot be asked."""
    try:
        known = seams.SUPPORTED_MODELS.resolve()()
    except Exception:  # importing vLLM can fail in any way
        return
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if facts.layout == "eagle" and not any(weights.vllm_name(name) in known for name in names):
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
