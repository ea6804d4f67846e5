"""The map from a head's draft vocabulary to the target's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from adaptivespec_vllm.engine.head.facts import HeadError, HeadFacts
from adaptivespec_vllm.engine.head.weights import MAP_NAMES, Tensors


def check_map(path: Path, facts: HeadFacts, tensors: Tensors) -> None:
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
