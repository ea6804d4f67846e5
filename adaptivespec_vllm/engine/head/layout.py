"""The tensors of a head's layers, checked against what its config says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaptivespec_vllm.engine.head import weights
from adaptivespec_vllm.engine.head.facts import HeadError, HeadFacts
from adaptivespec_vllm.engine.head.reading import DEFAULT_AUX_LAYERS, integer
from adaptivespec_vllm.engine.head.weights import Tensors


def check_layer(path: Path, facts: HeadFacts, tensors: Tensors) -> None:
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


def check_weights(
    path: Path, config: Mapping[str, Any], layer: Mapping[str, Any], facts: HeadFacts, tensors: Tensors
) -> None:
    """Every tensor of the layers is there, of the shape that the config says, and holds numbers."""
    kind = _kind(facts, layer)
    if kind is None:
        return
    layout = _layout(path, config, layer, facts, qwen3=kind == "qwen3")
    if weights.is_quantized(config, layer):
        return
    for fault in weights.faults(layout, tensors):
        raise HeadError(f"model: {path}: {fault}")


def _kind(facts: HeadFacts, layer: Mapping[str, Any]) -> str | None:
    if facts.layout == "speculators":
        kind = layer.get("model_type", "llama")
        return kind if kind in ("llama", "qwen3") else None
    return weights.kind_of(facts.architecture)


def _layout(
    path: Path, config: Mapping[str, Any], layer: Mapping[str, Any], facts: HeadFacts, *, qwen3: bool
) -> weights.Layout:
    heads = integer(path, layer, "num_attention_heads")
    kv_heads = integer(path, layer, "num_key_value_heads", None if qwen3 else heads)
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
        integer(path, layer, "num_hidden_layers")
    eagle = layer.get("eagle_config")
    eagle = eagle if isinstance(eagle, Mapping) else {}
    bias = bool(layer.get("attention_bias"))
    return weights.Layout(
        qwen3=qwen3,
        hidden=facts.hidden_size,
        layers=facts.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=integer(path, {"head_dim": stated}, "head_dim", facts.hidden_size // heads),
        intermediate=integer(path, layer, "intermediate_size"),
        vocab=facts.vocab_size,
        draft_vocab=facts.draft_vocab_size,
        fc_input=facts.target_hidden_size * (facts.aux_count or DEFAULT_AUX_LAYERS),
        aux=facts.aux_count,
        norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm")),
        attention_bias=bias,
        o_proj_bias=not qwen3 and (bias or bool(layer.get("bias"))),
        mlp_bias=not qwen3 and bool(layer.get("mlp_bias")),
    )
