"""Loading of a head by vLLM's own classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from adaptivespec_vllm.engine import seams
from adaptivespec_vllm.engine.head.weights import MAP_NAMES


def install_loading() -> None:
    """Let vLLM load a head whose map is ``unused``; called by our worker, so only where our method was asked for."""
    for seam in seams.HEAD_LOADING:
        seams.Wrap(seam, _without_unused_map).install()


def _without_unused_map(original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Any]]) -> Any:
    """vLLM's class has no place for a map where both vocabularies are the same, and would fail on one."""
    if getattr(model, "draft_id_to_target_id", None) is None:
        weights = ((name, weight) for name, weight in weights if name.rpartition(".")[2] not in MAP_NAMES)
    return original(model, weights)
