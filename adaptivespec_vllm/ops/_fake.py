"""Fake kernels: every op writes into its arguments and returns nothing, so tracing needs no shapes from here."""

from __future__ import annotations

from typing import Any

import torch

from ._native import native_ops_loaded

OPS = ("build_tree", "walk_trees", "tree_attention", "topk_logprobs", "linear", "draft_input", "draft_layer")


def _returns_nothing(*args: Any, **kwargs: Any) -> None:
    return None


if native_ops_loaded():
    for _name in OPS:
        torch.library.register_fake(f"adaptivespec::{_name}", _returns_nothing)
