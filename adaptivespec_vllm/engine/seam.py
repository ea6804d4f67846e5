"""A symbol of vLLM that this package relies on; ``seams`` and ``cuda_seams`` list them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

TESTED_VLLM = ("0.32.0",)


@dataclass(frozen=True)
class Seam:
    """A symbol of vLLM that this package relies on.

    Attributes:
        path: ``module:Class.attribute``.
        why: what it is used for.
        where: ``front`` is the process that builds the configuration, ``worker`` the one that runs the model.
        platform: the only platform that has the symbol, or "" for all.
        runner: the only model runner that needs the symbol, "V1" or "V2", or "" for both.
        tested: versions of vLLM that it was tried with; on CUDA, whose sources it was checked against.
        takes: names of arguments that it is called with.

    """

    path: str
    why: str
    where: Literal["front", "worker"] = "worker"
    platform: str = ""
    tested: tuple[str, ...] = TESTED_VLLM
    takes: tuple[str, ...] = ()
    runner: Literal["V1", "V2", ""] = ""

    def resolve(self) -> Any:
        """The symbol itself; raises ImportError or AttributeError when it is gone."""
        owner, name = self.owner()
        return getattr(owner, name)

    def owner(self) -> tuple[Any, str]:
        """The object that holds the symbol, and its name there."""
        module, _, qualified = self.path.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = qualified.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name
