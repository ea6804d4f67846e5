"""Short exercises made from a seed, for models that are too small for the usual tasks: nothing to download."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaptivespec_vllm.eval.tasks import Item, Mark, Task, last_number

_WORDS = (
    *("river", "lamp", "seven", "garden", "stone", "yellow", "window", "paper", "summer", "bridge", "apple", "silver"),
    *("mountain", "letter", "music", "orange", "forest", "table", "winter", "candle", "bottle", "island", "market"),
    *("pencil", "shadow", "copper", "basket", "harbor", "meadow", "velvet"),
)


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    return f"What is {a} + {b}? Answer with the number only.", str(a + b)


def _copy(rng: random.Random) -> tuple[str, str]:
    words = " ".join(rng.sample(_WORDS, rng.randint(6, 10)))
    return f"Repeat the following text exactly, and write nothing else: {words}", words


def _count(rng: random.Random) -> tuple[str, str]:
    first, length = rng.randint(1, 60), rng.randint(5, 9)
    numbers = ", ".join(map(str, range(first, first + length)))
    return f"Count from {first} to {first + length - 1}. Write the numbers separated by commas.", numbers


def _commas(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(_WORDS, rng.randint(4, 7))
    asked = f"Write these words again, in the same order and separated by commas: {' '.join(words)}"
    return asked, ", ".join(words)


KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sum": _sum,
    "copy": _copy,
    "count": _count,
    "commas": _commas,
}
"""Each makes a question and the text that has to stand in the answer."""


class Exercises(Task):
    """Sums, copying, counting and a format, the kinds in turns.

    Args:
        count: exercises.
        seed: the same seed and count give the same exercises; more of them begin with the same ones.

    """

    name = "exercises"
    fields = ("question", "answer", "kind")

    def __init__(self, count: int, seed: int) -> None:
        rng = random.Random(f"exercises {seed}")
        rows: list[dict[str, Any]] = []
        for number in range(count):
            kind = list(KINDS)[number % len(KINDS)]
            question, answer = KINDS[kind](rng)
            rows.append({"id": f"{kind}/{number}", "kind": kind, "question": question, "answer": answer})
        self.path = Path(self.name)
        self.items = [Item(row["id"], row) for row in rows]
        self.digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def message(self, item: Item) -> str:
        question: str = item.row["question"]
        return question

    def mark(self, item: Item, answer: str) -> Mark:
        wanted: str = item.row["answer"]
        if item.row["kind"] == "sum":
            return Mark(last_number(answer) == last_number(wanted))
        found = rf"(?<![\w,]){re.escape(wanted)}(?!,? ?\w)"
        return Mark(re.search(found, " ".join(answer.split()), re.IGNORECASE) is not None)
