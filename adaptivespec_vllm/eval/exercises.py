"""Short exercises made from a seed, for models that are too small for the usual tasks: nothing to download."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaptivespec_vllm.eval.tasks import Item, Mark, Task

EXAMPLES = 3
"""Worked examples before each question."""

_WORDS = (
    *("river", "lamp", "seven", "garden", "stone", "yellow", "window", "paper", "summer", "bridge", "apple", "silver"),
    *("mountain", "letter", "music", "orange", "forest", "table", "winter", "candle", "bottle", "island", "market"),
    *("pencil", "shadow", "copper", "basket", "harbor", "meadow", "velvet"),
)


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(1, 6), rng.randint(1, 4)
    return f"{a} + {b}", f"{a} + {b} = {a + b}"


def _copy(rng: random.Random) -> tuple[str, str]:
    words = " ".join(rng.sample(_WORDS, rng.randint(4, 6)))
    return words, words


def _count(rng: random.Random) -> tuple[str, str]:
    first = rng.randint(1, 80)
    return str(first), ", ".join(map(str, range(first, first + 6)))


def _commas(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(_WORDS, rng.randint(3, 5))
    return " ".join(words), ", ".join(words)


KINDS: dict[str, tuple[str, Callable[[random.Random], tuple[str, str]]]] = {
    "sum": ("Add the two numbers.", _sum),
    "copy": ("Write the same words again.", _copy),
    "count": ("Write this number and the five that come after it.", _count),
    "commas": ("Put a comma between the words.", _commas),
}
"""What is asked, and what makes a question and the line that answers it."""


class Exercises(Task):
    """Sums, copying, counting and a format, the kinds in turns, each with worked examples.

    Args:
        count: exercises.
        seed: the same seed gives the same exercises; more of them begin with the same ones.

    """

    name = "exercises"
    fields = ("question", "answer", "kind")
    stop = ("\n",)
    completed = True

    def __init__(self, count: int, seed: int) -> None:
        rng = random.Random(f"exercises {seed}")
        rows = [_row(number, rng) for number in range(count)]
        self.path = Path(self.name)
        self.items = [Item(row["id"], row) for row in rows]
        self.digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def message(self, item: Item) -> str:
        question: str = item.row["question"]
        return question

    def mark(self, item: Item, answer: str) -> Mark:
        """The first line is the answer; of sums what stands behind the equals sign, and counting may go on."""
        line, wanted = answer.strip().partition("\n")[0].strip(), item.row["answer"]
        if item.row["kind"] == "sum":
            return Mark(line.rpartition("=")[2].strip() == wanted.rpartition("=")[2].strip())
        if item.row["kind"] == "count":
            return Mark(f"{line},".startswith(f"{wanted},"))
        return Mark(line == wanted)


def _row(number: int, rng: random.Random) -> dict[str, Any]:
    kind = list(KINDS)[number % len(KINDS)]
    asked, make = KINDS[kind]
    *examples, (question, answer) = [make(rng) for _ in range(EXAMPLES + 1)]
    worked = "".join(f"Input: {given}\nOutput: {line}\n" for given, line in examples)
    return {
        "id": f"{kind}/{number}",
        "kind": kind,
        "question": f"{asked}\n{worked}Input: {question}\nOutput:",
        "answer": answer,
    }
