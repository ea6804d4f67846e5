"""What is known of a head and of its target."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from adaptivespec_vllm.config import ConfigError


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
