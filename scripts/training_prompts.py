#!/usr/bin/env python3
"""Prompts like those of the demo's head, from three public data sets: JSON lines for ``train-head --prompts``.

    scripts/training_prompts.py DIRECTORY > prompts.jsonl

DIRECTORY holds, as JSON lines, gzipped or not:

* ``gsm8k_train``: "id", "question" (GSM8K, MIT, OpenAI)
* ``mbpp``: "id", "split", "prompt", "code", "tests" (MBPP, CC BY 4.0, Austin et al. 2021); its test split is left out
* ``instructions``: "id", "instruction", "input" (seed tasks of self-instruct, Apache-2.0)
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MATH_PROMPTS = 900
SEED = 1


def rows(directory: Path, name: str) -> list[dict]:
    """Rows of a data set."""
    plain, packed = directory / f"{name}.jsonl", directory / f"{name}.jsonl.gz"
    text = plain.read_text("utf-8") if plain.exists() else gzip.decompress(packed.read_bytes()).decode("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def math(directory: Path) -> Iterator[dict]:
    """Word problems."""
    for row in random.Random(SEED).sample(rows(directory, "gsm8k_train"), MATH_PROMPTS):
        yield {"id": row["id"], "kind": "math", "prompt": row["question"]}


def code(directory: Path) -> Iterator[dict]:
    """Each task twice: described with its tests, and as a function to complete."""
    for row in rows(directory, "mbpp"):
        if row["split"] == "test":
            continue
        tests = "\n".join(row["tests"])
        yield {
            "id": row["id"],
            "kind": "code",
            "prompt": f"{row['prompt']}\nYour code should pass these tests:\n{tests}",
        }
        source = row["code"].replace("\r\n", "\n")
        if signature := re.search(r"^def .*?:\s*$", source, re.M):
            yield {
                "id": f"{row['id']}/complete",
                "kind": "code",
                "prompt": f"Complete this Python function:\n{source[: signature.end()].rstrip()}\n"
                f'    """ {row["prompt"]}\n{_examples(row["tests"])}\n    """\n',
            }


def _examples(tests: list[str]) -> str:
    pairs = [test.removeprefix("assert ").split("==", 1) for test in tests[:2] if "==" in test]
    return "\n".join(f"    >>> {call.strip()}\n    {value.strip()}" for call, value in pairs)


def chat(directory: Path) -> Iterator[dict]:
    """Instructions of all sorts."""
    for row in rows(directory, "instructions"):
        prompt = f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]
        yield {"id": row["id"], "kind": "chat", "prompt": prompt}


def main() -> None:
    """Print all prompts, kinds mixed."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1])
    prompts = [*math(directory), *code(directory), *chat(directory)]
    random.Random(SEED).shuffle(prompts)
    for prompt in prompts:
        print(json.dumps(prompt))


if __name__ == "__main__":
    main()
