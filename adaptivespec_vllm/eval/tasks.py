"""What is asked, and when an answer is right: one class a kind of data, one file of JSON lines (or .gz of it) each."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, ClassVar

from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.config import shortened
from adaptivespec_vllm.eval import sandbox


@dataclass(frozen=True)
class Item:
    """A question.

    Attributes:
        id: the row's own, or its line.
        row: as it stands in the file.

    """

    id: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Mark:
    """Whether an answer is right; None where nothing says so."""

    correct: bool | None
    why: str = ""


class Task(ABC):
    """Questions of one kind.

    Attributes:
        name: of the task, and of the option that gives its file.
        fields: strings that every row needs.
        stop: texts that end an answer, for a model without a chat format.
        completed: the text is given as it is, for any model to go on with.

    """

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    stop: ClassVar[tuple[str, ...]] = ()
    completed: ClassVar[bool] = False

    def __init__(self, path: Path) -> None:
        self.path = path
        data = _bytes(f"--{self.name}", path)
        self.digest = hashlib.sha256(data).hexdigest()
        self.items = self._items(data)

    @abstractmethod
    def message(self, item: Item) -> str:
        """What the model is asked."""

    @abstractmethod
    def mark(self, item: Item, answer: str) -> Mark:
        """Whether an answer is right."""

    def prepare(self) -> None:  # noqa: B027 - most tasks need nothing
        """Find out whether answers can be marked here.

        Raises:
            BadInput: they cannot.

        """

    def few(self, limit: int | None) -> list[Item]:
        """At most ``limit`` of the items, spread evenly over the file."""
        if limit is None or limit >= len(self.items):
            return self.items
        return [self.items[i * len(self.items) // limit] for i in range(limit)]

    def _items(self, data: bytes) -> list[Item]:
        option, items = f"--{self.name}", []
        for number, line in enumerate(data.decode("utf-8", errors="replace").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            row = self._row(row) if isinstance(row, dict) else {}
            if not all(isinstance(row.get(name), str) and row[name] for name in self.fields):
                named = ", ".join(f'"{name}"' for name in self.fields)
                raise BadInput(option, f"{shortened(self.path.name)}:{number}", f"an object a line, with {named}")
            items.append(Item(str(row.get("id", number)), row))
        if not items:
            raise BadInput(option, str(self.path), "a file with at least one row")
        if len({item.id for item in items}) < len(items):
            raise BadInput(option, str(self.path), "rows whose ids differ")
        return items

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        return row


class Gsm8k(Task):
    """Grade-school mathematics: the last number of the answer (behind ``####`` where there is one) is compared."""

    name = "gsm8k"
    fields = ("question", "answer")
    stop = ("\nQuestion:",)

    def message(self, item: Item) -> str:
        return f'{item.row["question"]}\n\nThink step by step. End with a line "#### N", where N is the answer.'

    def mark(self, item: Item, answer: str) -> Mark:
        wanted, given = last_number(item.row["answer"]), last_number(answer)
        return Mark(given is not None and given == wanted, "no number" if given is None else "")


class HumanEval(Task):
    """Functions to complete, run against their tests in a sandbox; pass@1 of the one answer that there is."""

    name = "humaneval"
    fields = ("prompt", "entry_point", "test")
    stop = ("\ndef ", "\nclass ", "\nif __name__", "\nprint(")

    def message(self, item: Item) -> str:
        return (
            "Complete this Python function. Answer with the whole function in one block of code.\n\n"
            f"```python\n{item.row['prompt'].strip()}\n```"
        )

    def mark(self, item: Item, answer: str) -> Mark:
        outcome = sandbox.run(program(item.row, answer))
        return Mark(outcome.passed, outcome.why)

    def prepare(self) -> None:
        try:
            sandbox.check()
        except sandbox.SandboxUnavailable as error:
            raise BadInput("--humaneval", str(self.path), f"a machine with a sandbox ({error})") from None


class Math(Task):
    """Competition mathematics: the boxed answer is compared symbolically, by the library ``math-verify``."""

    name = "math"
    fields = ("problem", "answer")
    stop = ("\nProblem:",)

    def message(self, item: Item) -> str:
        return f"{item.row['problem']}\n\nReason step by step, and put the final answer within \\boxed{{}}."

    def mark(self, item: Item, answer: str) -> Mark:
        from math_verify import parse, verify

        given = parse(answer)
        right = bool(given) and bool(verify(parse(f"\\boxed{{{item.row['answer']}}}"), given))
        return Mark(right, "" if given else "no answer")

    def prepare(self) -> None:
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise BadInput(
                "--math", str(self.path), "with math-verify: pip install 'adaptivespec-vllm[eval]'"
            ) from None


class Prompts(Task):
    """Any prompts: nothing says what is right, so that only texts are compared."""

    name = "prompts"
    fields = ("prompt",)

    def message(self, item: Item) -> str:
        text: str = item.row["prompt"]
        return text

    def mark(self, item: Item, answer: str) -> Mark:
        return Mark(None)

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        """``prompt``, or what other data sets call it: ``question``, ``instruction``, the first of ``turns``."""
        turns = row.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        prompt = next((row[name] for name in ("prompt", "question", "instruction") if row.get(name)), first)
        return {**row, "prompt": prompt}


TASKS: tuple[type[Task], ...] = (Gsm8k, HumanEval, Math, Prompts)

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """The number behind the last ``####``, or the last one in the text."""
    _, marked, rest = text.rpartition("####")
    found = _NUMBER.findall(rest)[:1] if marked else []
    found = found or _NUMBER.findall(text)[-1:]
    if not found:
        return None
    try:
        return Decimal(found[0].replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


_BLOCK = re.compile(r"```(?:[Pp]ython)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def program(row: Mapping[str, Any], answer: str) -> str:
    """The program that tells whether an answer is right: the function, its tests, their call.

    The function is the first block of code that defines it; an answer without one goes on where the prompt stops.
    """
    blocks: list[str] = _BLOCK.findall(answer)
    definition = re.compile(rf"^\s*def\s+{re.escape(row['entry_point'])}\s*\(", re.MULTILINE)
    whole = next((text for text in [*blocks, answer] if definition.search(text)), None)
    if whole is not None:
        # What the prompt imports and defines comes first: an answer often leaves it out.
        function = f"{row['prompt']}    pass\n\n{whole}"
    else:
        function = row["prompt"] + (blocks[0] if blocks else answer)
    return f"{function}\n\n{row['test']}\n\ncheck({row['entry_point']})\n"


def _bytes(option: str, path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError):
        raise BadInput(option, str(path), "a file of JSON lines that can be read") from None
