"""What ``benchmarks.lossy_rules`` decoded, as a table and as a result of ``adaptivespec eval``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from adaptivespec_vllm.bench.arms import PLAIN, Arm
from adaptivespec_vllm.config import METHOD, load
from adaptivespec_vllm.eval.answers import Answer
from adaptivespec_vllm.eval.exercises import Exercises
from adaptivespec_vllm.eval.fidelity import repetition
from adaptivespec_vllm.eval.result import Figures, Result, figures, too_small
from adaptivespec_vllm.eval.tasks import Prompts

RESAMPLES = 2000
WINDOW = 256
_HEADINGS = (
    "arm | n | tokens a step | against strict | 95 % interval | nats a token | promoted | same text | "
    "first difference | times plain, cpu-2core | times plain, a100-8b"
)


def read(output: Path) -> list[dict[str, Any]]:
    """A row an arm, their texts in one order: rows of other runs may have had another."""
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["texts"].sort(key=lambda text: text["id"])
    return rows


def show(output: Path, directory: Path | None) -> None:
    """Print the table; write ``eval.json`` to a directory."""
    rows = read(output)
    result = evaluated(rows)
    print(_HEADINGS)
    by_name, plain = {row["arm"]: row for row in rows}, plain_of(rows)
    for row, own in zip(rows, result.figures, strict=True):
        strict = by_name.get(row["arm"].partition("@")[0], plain)
        print(" | ".join(cells(row, own, strict, plain)))
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        print(result.write(directory))


def drift(output: Path) -> None:
    """Print how figures change along the answers, kind by kind, in windows of WINDOW tokens."""
    rows = read(output)
    for row in rows:
        for kind in dict.fromkeys(text["kind"] for text in row["texts"]):
            texts = [text for text in row["texts"] if text["kind"] == kind]
            longest = max(len(text["tokens"]) for text in texts)
            parts = [window(texts, first) for first in range(0, longest - WINDOW + 1, WINDOW)]
            for name, values in zip(("nats a token", "repeated runs"), zip(*parts, strict=True), strict=True):
                print(" | ".join([row["arm"], kind, name, *(f"{value:.3f}" for value in values)]))


def window(texts: list[dict[str, Any]], first: int) -> tuple[float, float]:
    """Nats a token and repeated runs of WINDOW tokens of each text."""
    places = range(first, first + WINDOW)
    lost = sum(nats for text in texts for place, nats in text["losses"] if place in places)
    repeated = [repetition(text["tokens"][first : first + WINDOW]) for text in texts]
    return lost / (WINDOW * len(texts)), float(np.mean(repeated))


def evaluated(rows: list[dict[str, Any]]) -> Result:
    """The same figures as those of ``adaptivespec eval``."""
    plain = answers_of(plain_of(rows))
    task = Exercises if any(text.get("correct") is not None for text in rows[0]["texts"]) else Prompts
    made = [figures(arm_of(row), task, answers_of(row), plain) for row in rows]  # type: ignore[arg-type]
    settings = rows[0]["settings"] | {"arms": {row["arm"]: row["speculative"] for row in rows}}
    result = Result(provenance=rows[0]["provenance"], settings=settings, complete=True, figures=made)
    result.warnings += too_small(made)
    return result


def plain_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next(row for row in rows if row["arm"] == PLAIN)


def arm_of(row: dict[str, Any]) -> Arm:
    options = row["speculative"]
    if options is None:
        return Arm(PLAIN, "plain", None)
    assert options["method"] == METHOD
    return Arm(row["arm"], "policy", options, load(options, foreign=options.keys()).config.lossless)


def answers_of(row: dict[str, Any]) -> list[Answer]:
    return [
        Answer(
            arm=row["arm"], task="", id=text["id"], text=text["text"], tokens=text["tokens"], losses=text["losses"],
            finish=text["finish"], correct=text["correct"], seconds=0.0, steps=text["steps"],
        )
        for text in row["texts"]
    ]  # fmt: skip


def cells(row: dict[str, Any], own: Figures, strict: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """A line of the table."""
    ratio, low, high = against(row, strict)
    told, pair = own.fidelity, own.paired
    marks = [] if own.accuracy is None else [f"{100 * own.accuracy:.1f} %"]
    if pair is not None:
        marks.append(f"-{pair.lost} +{pair.gained}, p {pair.p:.3f}")
    if pair is not None and pair.recovery is not None:
        marks.append("recovery {:.3f} ({:.3f} to {:.3f})".format(*pair.recovery))
    return [
        row["arm"],
        str(own.n),
        f"{own.accepted_length:.3f}",
        f"{ratio:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{told.lost:.4f}",
        f"{100 * (told.promoted or 0):.1f} %",
        f"{100 * told.same:.0f} %",
        "" if told.divergence is None else f"{told.divergence:.0f}",
        *(f"{speed(row, name) / speed(plain, name):.2f}" for name in ("cpu-2core", "a100-8b")),
        *marks,
    ]


def speed(row: dict[str, Any], table: str) -> float:
    """Tokens a second in virtual time, a request at a time."""
    decoded, seconds = counts(row, "decoded"), [text["seconds"][table] for text in row["texts"]]
    return float(decoded.sum() / sum(seconds))


def counts(row: dict[str, Any], name: str) -> np.ndarray:
    return np.array([text[name] for text in row["texts"]], dtype=float)


def against(row: dict[str, Any], strict: dict[str, Any]) -> tuple[float, float, float]:
    """Tokens a step over those of another arm, with its 95 % interval by bootstrap over prompts."""
    data = np.array([counts(one, name) for one in (row, strict) for name in ("decoded", "steps")])
    drawn = data[:, np.random.default_rng(0).integers(data.shape[1], size=(RESAMPLES, data.shape[1]))].sum(-1)
    ratios = drawn[0] / drawn[1] / (drawn[2] / drawn[3])
    low, high = np.percentile(ratios, (2.5, 97.5))
    own, other = data[:2].sum(1), data[2:].sum(1)
    return float(own[0] / own[1] / (other[0] / other[1])), float(low), float(high)
