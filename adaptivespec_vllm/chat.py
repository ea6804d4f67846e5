"""Conversations as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def encode(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation in the model's chat format, up to where its answer starts."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))
