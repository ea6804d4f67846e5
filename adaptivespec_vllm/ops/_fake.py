"""Fake kernels: every op writes into its arguments and returns nothing, so tracing needs no shapes from here."""

from __future__ import annotations

from typing import Any

import torch

from ._native import CPU_OPS, native_ops_loaded

OPS = CPU_OPS


def _returns_nothing(*args: Any, **kwargs: Any) -> None:
    return None


if native_ops_loaded():
    for _name in OPS:
        torch.library.register_fake(f"adaptivespec::{_name}", _returns_nothing)
