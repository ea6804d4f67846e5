"""The schema of ``eval.json``: figures of each arm on each task, with where and how they were made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from adaptivespec_vllm.bench.arms import PLAIN, Arm
from adaptivespec_vllm.eval import statistics
from adaptivespec_vllm.eval.answers import Answer
from adaptivespec_vllm.eval.fidelity import Fidelity, fidelity
from adaptivespec_vllm.eval.tasks import Task

FILE = "eval.json"


class Paired(BaseModel):
    """An arm's marks against those of plain decoding, question by question.

    Attributes:
        lost: questions that plain decoding answers right and the arm does not.
        gained: the other way round.
        p: of McNemar's exact test.
        recovery: accuracy over that of plain decoding, with its 95 % interval; None where plain has none right.
        resolution: the difference of accuracies that so many questions can just tell from none.

    """

    lost: int
    gained: int
    p: float
    recovery: tuple[float, float, float] | None
    resolution: float


class Figures(BaseModel):
    """An arm on a task, over the questions that plain decoding has answered too.

    Attributes:
        accuracy: None where nothing says what is right.
        seconds: of decoding, marking not counted; log-probabilities are computed for every token, which takes time.
        accepted_length: tokens a step of a request, the target's own included; None of stock chains, whose steps are
            not counted.

    """

    arm: str
    task: str
    lossless: bool
    n: int
    accuracy: float | None
    paired: Paired | None
    fidelity: Fidelity
    tokens: int
    seconds: float
    accepted_length: float | None = None


class Result(BaseModel):
    """A run, whole or so far."""

    format: Literal[1] = 1
    provenance: dict[str, Any]
    settings: dict[str, Any]
    complete: bool = False
    figures: list[Figures] = []
    warnings: list[str] = []

    def write(self, directory: Path) -> Path:
        """Write to the directory of the run; the file is whole at any time."""
        path = directory / FILE
        temporary = path.with_suffix(".tmp")
        temporary.write_text(self.model_dump_json(indent=1), encoding="utf-8")
        temporary.replace(path)
        return path


def figures(arm: Arm, task: Task, answers: Sequence[Answer], plain: Sequence[Answer]) -> Figures:
    """Of answers to the same questions, in the same order; at least one."""
    marks = [answer.correct for answer in answers]
    marked = [mark for mark in marks if mark is not None]
    paired = None
    if marked and arm.name != PLAIN:
        before, after = [bool(answer.correct) for answer in plain], [bool(mark) for mark in marks]
        lost = sum(b and not a for b, a in zip(before, after, strict=True))
        gained = sum(a and not b for b, a in zip(before, after, strict=True))
        paired = Paired(
            lost=lost,
            gained=gained,
            p=statistics.mcnemar(lost, gained),
            recovery=statistics.recovery(before, after),
            resolution=statistics.resolution(lost, gained, len(before)),
        )
    return Figures(
        arm=arm.name,
        task=task.name,
        lossless=arm.lossless,
        n=len(answers),
        accuracy=sum(marked) / len(marked) if marked else None,
        paired=paired,
        fidelity=fidelity(answers, plain),
        tokens=sum(len(answer.tokens) for answer in answers),
        seconds=sum(answer.seconds for answer in answers),
        accepted_length=1.0 if arm.name == PLAIN else _accepted_length(answers),
    )


def _accepted_length(answers: Sequence[Answer]) -> float | None:
    steps = [answer.steps for answer in answers if answer.steps is not None]
    if len(steps) < len(answers) or not sum(steps):
        return None
    return sum(len(answer.tokens) - 1 for answer in answers) / sum(steps)


def too_small(rows: Sequence[Figures]) -> Iterator[str]:
    """What the numbers of questions do not allow to say, task by task."""
    for task in dict.fromkeys(row.task for row in rows):
        own = [row for row in rows if row.task == task]
        paired = [row.paired for row in own if row.paired is not None]
        plain = next((row for row in own if row.arm == PLAIN), own[0])
        if plain.accuracy is not None and plain.accuracy * plain.n < 10:
            yield (
                f"{task}: plain decoding has {round(plain.accuracy * plain.n)} of {plain.n} right, too few to lose "
                "any; accuracy says nothing about this model"
            )
        coarse = max((pair.resolution for pair in paired), default=0.0)
        if coarse > statistics.ENOUGH:
            yield (
                f"{task}: {plain.n} questions can tell accuracies apart that differ by {100 * coarse:.0f} points or "
                "more; less than that is neither shown nor ruled out"
            )
