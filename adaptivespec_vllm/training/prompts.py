"""Prompts that a target is asked to answer: read from JSON Lines, or written by the target itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptivespec_vllm.config import ConfigError, shortened

MARK = "\u241eUSER\u241e"
"""Stands for the user's words in a rendered chat; a symbol that no template contains."""


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with the user's turn."""

    id: str
    kind: str
    messages: tuple[dict[str, str], ...]


def read_prompts(path: Path) -> list[Prompt]:
    """Rows with "prompt" (a user's message) or "messages"; "id" and "kind" are optional.

    Raises:
        ConfigError: a file that cannot be read or a row that is no prompt, with its line.

    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: {path}: {error}") from error
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts: {path} is empty; allowed: a JSON object with 'prompt' or 'messages' a line")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ConfigError(f"--prompts: {path}: the id {shortened(prompt.id)!r} appears twice")
        seen.add(prompt.id)
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--prompts: {where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ConfigError(f"--prompts: {where}: got {shortened(line)}; allowed: a JSON object")
    messages: Any = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    if not _is_conversation(messages):
        raise ConfigError(
            f"--prompts: {where}: got {shortened(line)}; allowed: 'prompt' with a text, or 'messages' with roles and "
            "texts, the last one the user's"
        )
    return Prompt(str(row.get("id", where)), str(row.get("kind", "text")), tuple(messages))


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
        and all(isinstance(m.get("content"), str) for m in messages)
        and messages[-1]["role"] == "user"
    )


def user_turn(tokenizer: Any) -> tuple[list[int], str]:
    """What comes before a user's words in the chat format (token ids), and what ends them.

    A chat model that continues the first writes a user's message of its own.
    """
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before, _, after = text.partition(MARK)
    end = next((token for token in tokenizer.all_special_tokens if after.startswith(token)), after[:1])
    return list(tokenizer.encode(before, add_special_tokens=False)), end


def own_prompts(texts: list[str]) -> Iterator[Prompt]:
    """The target's own messages as prompts: no duplicates, nothing too short to answer."""
    seen: set[str] = set()
    for text in texts:
        text = text.strip()
        if len(text) >= 12 and text not in seen:
            seen.add(text)
            yield Prompt(f"own/{len(seen)}", "own", ({"role": "user", "content": text},))
