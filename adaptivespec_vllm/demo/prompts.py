"""Short prompts of three kinds, written for this demo."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """A user message and the kind of text that its answer is."""

    kind: str
    text: str


WARM_UP = Prompt("chat", "Say hello to a new colleague in one sentence.")

PROMPTS = (
    Prompt(
        "math",
        "A baker fills 6 trays with 12 rolls each and sells 45 of them before noon. How many rolls are left? "
        "Think step by step.",
    ),
    Prompt(
        "code",
        "Write a Python function `count_vowels(text)` that returns how many vowels a string has. Add a docstring.",
    ),
    Prompt("chat", "Why do leaves change colour in autumn? Explain it to a ten-year-old."),
    Prompt(
        "math",
        "A train covers 180 km in 3 hours, then 100 km in 2 hours. What is its average speed over the whole trip? "
        "Show your work.",
    ),
    Prompt("code", "Write a Python function that merges two sorted lists into one sorted list."),
    Prompt("chat", "Give me three tips for keeping houseplants alive during a holiday of two weeks."),
    Prompt(
        "math",
        "Maya saves 15 dollars a week and spends 20 dollars once a month of four weeks. How much has she after "
        "3 months? Explain each step.",
    ),
    Prompt("code", "Write a Python class `Stack` with the methods push, pop and is_empty, and show how to use it."),
    Prompt("chat", "Write a short, friendly e-mail that moves a dinner from Friday to Saturday evening."),
)
