"""Tasks: what is asked, when an answer is right, what files must hold."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.eval import sandbox
from adaptivespec_vllm.eval.exercises import Exercises
from adaptivespec_vllm.eval.tasks import Gsm8k, HumanEval, Item, Math, Prompts, last_number, program


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She pays $1,234.50 in all.", "1234.50"),
        ("12 apples and 3 pears make 15.", "15"),
        ("#### 7 apples, not 8", "7"),
        ("#### 3\nno, wait:\n#### 4", "4"),
        ("####\n\nthe answer is 5", "5"),
        ("It falls by -3 degrees", "-3"),
        ("From -$2 to -$20", "-20"),
        ("none", None),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def test_gsm8k(tmp_path: Path) -> None:
    task = Gsm8k(written(tmp_path / "q.jsonl", [{"id": "a", "question": "2 + 3 hundred?", "answer": "302"}]))
    (item,) = task.items
    assert task.message(item).startswith("2 + 3 hundred?\n\n")
    assert task.mark(item, "That is 302.00.").correct
    assert not task.mark(item, "That is 30.").correct
    mark = task.mark(item, "I do not know.")
    assert (mark.correct, mark.why) == (False, "no number")


# A problem of our own, in the form of HumanEval.
ADD = {
    "id": "own/0",
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum of a list.\n'
    '    >>> total([1, 2])\n    3\n    """\n',
    "entry_point": "total",
    "test": "\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
WHOLE = "def total(xs: List[int]) -> int:\n    return sum(xs)"


@pytest.mark.parametrize(
    ("answer", "correct"),
    [
        ("    return sum(xs)\n", True),  # the prompt goes on
        (f"Of course:\n```python\n{WHOLE}\n```\nIt sums.", True),  # without the import
        (f"```\nfrom typing import List\n{WHOLE}\n```", True),
        (f"```python\n{WHOLE}", True),  # never closed
        (f"First an idea:\n```python\nx = 1\n```\nNow:\n```python\n{WHOLE}\n```", True),
        (WHOLE, True),
        ("```python\n    return sum(xs)\n```", True),
        ("```python\ndef total(xs):\n    return 3\n```", False),
        ("I cannot do that.", False),
        ("", False),
        ("```python\nimport os\nos._exit(0)\n```", False),
    ],
)
def test_humaneval(tmp_path: Path, answer: str, correct: bool) -> None:
    try:
        sandbox.check()
    except sandbox.SandboxUnavailable as error:
        pytest.skip(str(error))
    task = HumanEval(written(tmp_path / "q.jsonl", [ADD]))
    (item,) = task.items
    mark = task.mark(item, answer)
    assert mark.correct == correct, mark


def test_the_program_that_is_run_calls_the_tests() -> None:
    assert program(ADD, "    return 0\n").endswith("check(total)\n")


def test_the_message_holds_the_function(tmp_path: Path) -> None:
    task = HumanEval(written(tmp_path / "q.jsonl", [ADD]))
    assert ADD["prompt"].strip() in task.message(task.items[0])


@pytest.mark.parametrize(
    ("wanted", "answer", "correct"),
    [
        ("\\frac{1}{2}", "So it is \\boxed{0.5}.", True),
        ("\\frac{1}{2}", "So it is \\boxed{\\frac{2}{4}}.", True),
        ("x^2+2x", "\\boxed{x(x+2)}", True),
        ("3", "\\boxed{4}", False),
        ("3", "I do not know", False),
    ],
)
def test_math(tmp_path: Path, wanted: str, answer: str, correct: bool) -> None:
    pytest.importorskip("math_verify")
    task = Math(written(tmp_path / "q.jsonl", [{"problem": "What is it?", "answer": wanted}]))
    task.prepare()
    assert task.mark(task.items[0], answer).correct == correct


def test_math_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    task = Math(written(tmp_path / "q.jsonl", [{"problem": "?", "answer": "1"}]))
    with pytest.raises(BadInput, match=r"--math: .*math-verify"):
        task.prepare()


@pytest.mark.parametrize(
    "row",
    [{"prompt": "Hello"}, {"question": "Hello"}, {"instruction": "Hello"}, {"turns": ["Hello", "And then?"]}],
)
def test_prompts_of_any_data_set(tmp_path: Path, row: dict[str, Any]) -> None:
    task = Prompts(written(tmp_path / "q.jsonl", [row]))
    assert task.message(task.items[0]) == "Hello"
    assert task.items[0].id == "1"
    assert task.mark(task.items[0], "Hi").correct is None


def test_packed_files(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n\n{"prompt": "b"}\n'))
    assert Prompts(path).items == [Item("1", {"prompt": "a"}), Item("3", {"prompt": "b"})]


def test_few_are_spread_over_the_file(tmp_path: Path) -> None:
    task = Prompts(written(tmp_path / "q.jsonl", [{"prompt": str(i)} for i in range(10)]))
    assert [item.row["prompt"] for item in task.few(4)] == ["0", "2", "5", "7"]
    assert task.few(None) == task.few(99) == task.items


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"question": "a"}', 'q.jsonl:1"; allowed: an object a line, with "question", "answer"'),
        ('{"question": "a", "answer": "1"}\n{"question": "b", "answer": 2}', "q.jsonl:2"),
        ("[]", "q.jsonl:1"),
        ("no JSON", "q.jsonl:1"),
        ("\n\n", "at least one row"),
        ('{"id": "x", "question": "a", "answer": "1"}\n{"id": "x", "question": "b", "answer": "2"}', "ids differ"),
    ],
)
def test_files_that_hold_no_questions(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"^--gsm8k: got ") as caught:
        Gsm8k(path)
    assert said in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="that can be read"):
        Gsm8k(tmp_path / "nowhere.jsonl")
    (tmp_path / "q.gz").write_text("not packed")
    with pytest.raises(BadInput, match="that can be read"):
        Gsm8k(tmp_path / "q.gz")


def test_exercises_are_made_of_their_seed() -> None:
    eight = Exercises(8, 0)
    assert [item.row for item in Exercises(12, 0).items][:8] == [item.row for item in eight.items]
    assert Exercises(8, 1).digest != eight.digest == Exercises(8, 0).digest
    assert [item.row["kind"] for item in eight.items] == 2 * ["sum", "copy", "count", "commas"]
    assert len({item.id for item in eight.items}) == 8


def test_exercises_are_marked() -> None:
    task = Exercises(4, 0)
    total, copy, count, commas = task.items
    for item in task.items:
        answer = item.row["answer"]
        assert item.row["question"].count("Output:") == 4 and item.row["question"].endswith("Output:")
        assert task.mark(item, f" {answer}").correct
        assert task.mark(item, f"{answer}\n\nThe answer is 1").correct
        assert not task.mark(item, answer[:-1]).correct and not task.mark(item, "").correct
    result = total.row["answer"].rpartition(" ")[2]
    assert task.mark(total, result).correct and not task.mark(total, f"{result}0").correct
    for item, more in ((copy, " and"), (commas, ", lamp")):
        assert not task.mark(item, item.row["answer"] + more).correct  # it did not stop
    assert (
        task.mark(count, count.row["answer"] + ", 9").correct
        and not task.mark(count, count.row["answer"] + "0").correct
    )
