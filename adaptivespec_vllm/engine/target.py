"""What either model runner asks of the target."""

from __future__ import annotations

from collections.abc import Iterable


def eos_ids(eos_token_id: int | Iterable[int] | None) -> set[int]:
    """Token ids that end a text, from what a model's own configuration has as ``eos_token_id``."""
    return {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
