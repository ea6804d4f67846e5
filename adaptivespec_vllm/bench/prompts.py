"""What is decoded: prompts of several kinds, as token ids, lengthened and put into batches."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptivespec_vllm import chat
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.config import shortened
from adaptivespec_vllm.demo.prompts import PROMPTS

_GOODS = ("oranges", "timber", "salt", "glass", "wool", "machine parts", "paper", "tea", "copper wire", "seed corn")
_PORTS = ("Lindholm", "Port Alder", "Nowa Zatoka", "Sainte-Claire", "Brightwater", "Kestrel Bay", "Vik", "Old Harbour")
_REMARKS = (
    "Two crates were damaged by rain and set aside.",
    "The captain asked for an early berth.",
    "Customs held the papers until the afternoon.",
    "Nothing unusual was noted.",
    "The crane on pier four was out of order again.",
    "A buyer collected everything the same day.",
)


@dataclass(frozen=True)
class Prompt:
    """A user message; ``kind`` is the kind of text that its answer is."""

    id: str
    kind: str
    text: str


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids."""

    id: str
    kind: str
    tokens: tuple[int, ...]


def bundled() -> list[Prompt]:
    """The prompts of the demo."""
    return [Prompt(f"demo/{number}", prompt.kind, prompt.text) for number, prompt in enumerate(PROMPTS)]


def read(path: Path) -> list[Prompt]:
    """Prompts of a file of JSON lines, each with "id", "kind" and "prompt"."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise BadInput("--prompts", str(path), "a file of JSON lines that can be read") from None
    prompts = [_row(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise BadInput("--prompts", str(path), "a file with at least one prompt")
    return prompts


def _row(path: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
        prompt = Prompt(row["id"], row["kind"], row["prompt"])
        if all(isinstance(value, str) and value for value in (prompt.id, prompt.kind, prompt.text)):
            return prompt
    except (ValueError, KeyError, TypeError):
        pass
    raise BadInput(
        "--prompts", f"{shortened(path.name)}:{number}", 'an object a line, with the strings "id", "kind" and "prompt"'
    )


def choose(prompts: Sequence[Prompt], kinds: Sequence[str] | None, limit: int | None) -> list[Prompt]:
    """Those of ``kinds``, in that order; at most ``limit`` of each, spread evenly over the file."""
    present = list(dict.fromkeys(prompt.kind for prompt in prompts))
    for kind in kinds or ():
        if kind not in present:
            raise BadInput("--kinds", kind, f"kinds of the prompts: {', '.join(present)}")
    chosen: list[Prompt] = []
    for kind in kinds or present:
        own = [prompt for prompt in prompts if prompt.kind == kind]
        few = own if limit is None or limit >= len(own) else [own[i * len(own) // limit] for i in range(limit)]
        chosen += few
    return chosen


def encode(tokenizer: Any, prompt: Prompt, context: int | None, seed: int) -> Encoded:
    """Token ids in the model's chat format, with about ``context`` of them (none added without)."""
    tokens = in_chat_format(tokenizer, prompt.text)
    if context is not None and len(tokens) < context:
        tokens = _lengthened(tokenizer, prompt, context, seed)
    return Encoded(prompt.id, prompt.kind, tuple(tokens))


def in_chat_format(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user's message; of a model without a chat format those of the text itself."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode(text))
    return chat.encode(tokenizer, [{"role": "user", "content": text}])


def _lengthened(tokenizer: Any, prompt: Prompt, context: int, seed: int) -> list[int]:
    """The prompt behind as much of a made-up log as brings it to about ``context`` tokens.

    Each prompt has a log of its own, so that no two requests share a prefix, and the entries do not repeat, which
    would make the text easy to predict.
    """
    rng = random.Random(f"{seed} {prompt.id}")
    entries: list[str] = []
    tokens: list[int] = []
    while len(tokens) < context:
        missing = context - len(tokens)
        entries += [_entry(rng, len(entries) + i) for i in range(max(1, missing // 60))]
        log = "\n".join(entries)
        tokens = in_chat_format(
            tokenizer, f"Log of the harbour, for reference:\n{log}\n\nWithout the log: {prompt.text}"
        )
    return tokens


def _entry(rng: random.Random, day: int) -> str:
    return (
        f"Day {day + 1}: {rng.randint(2, 90)} crates of {rng.choice(_GOODS)} from {rng.choice(_PORTS)} for "
        f"{rng.choice(_PORTS)}, {rng.randint(110, 990)} kg. {rng.choice(_REMARKS)}"
    )


def batches(prompts: Sequence[Encoded], batch: int) -> list[list[Encoded]]:
    """Batches of one kind each, all of the full size: the last of a kind is filled up from its beginning."""
    result = []
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        own = [prompt for prompt in prompts if prompt.kind == kind]
        for first in range(0, len(own), batch):
            result.append([own[(first + i) % len(own)] for i in range(batch)])
    return result


def digest(prompts: Iterable[Encoded]) -> str:
    """The same for the same tokens."""
    text = json.dumps([prompt.tokens for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
