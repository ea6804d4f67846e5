"""From answers to the figures of each arm, the table on the screen and the JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from adaptivespec_vllm.demo.arms import Arm
from adaptivespec_vllm.demo.decode import Answer
from adaptivespec_vllm.demo.prompts import Prompt

ROOMY = 90
"""Columns from which on the table has room between its own."""


@dataclass(frozen=True)
class Figures:
    """One row of the table; ``None`` where there is nothing to say.

    Attributes:
        tokens_per_second: tokens emitted by decoding steps / their time; the prefill counts in neither.
        ratio: of tokens per second, to plain decoding.
        accepted_length: tokens emitted / decoding steps, the target's own token included.
        depth, width, nodes: means over steps of what was drafted, the root not counted.
        promoted: tokens kept by the margin rule although the target would have chosen another.
        same_text: answers equal to plain decoding, token for token, out of ``prompts``.
        ratio_by_kind: ``ratio`` for each kind of text.

    """

    arm: str
    title: str
    prompts: int
    tokens: int
    steps: int
    tokens_per_second: float | None
    ratio: float | None
    accepted_length: float | None
    depth: float | None
    width: float | None
    nodes: float | None
    promoted: int | None
    regret_nats: float | None
    same_text: int | None
    first_differences: list[int | None] | None
    ratio_by_kind: dict[str, float | None]
    prefill_seconds: float
    decode_seconds: float
    engine_seconds: dict[str, float]


def figures(arm: Arm, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Answer]]) -> Figures:
    """The figures of an arm over its prompts; ``answers`` has a list in the order of the prompts for each arm."""
    own, plain = answers[arm.name], answers.get("plain", ())
    steps = sum(answer.steps for answer in own)
    speed = _speed(own)
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    differences = [first_difference(a.tokens, b.tokens) for a, b in zip(own, plain, strict=True)] if plain else None
    return Figures(
        arm=arm.name,
        title=arm.title,
        prompts=len(own),
        tokens=sum(len(answer.tokens) for answer in own),
        steps=steps,
        tokens_per_second=speed,
        ratio=_ratio(speed, _speed(plain)),
        accepted_length=_ratio(sum(answer.decoded for answer in own), steps),
        **_drafted(arm, own),
        same_text=None if differences is None else sum(place is None for place in differences),
        first_differences=differences,
        ratio_by_kind={
            kind: _ratio(_speed(_of_kind(kind, prompts, own)), _speed(_of_kind(kind, prompts, plain))) for kind in kinds
        },
        prefill_seconds=sum(answer.prefill_seconds for answer in own),
        decode_seconds=sum(answer.decode_seconds for answer in own),
        engine_seconds=_sum_of_maps([answer.engine.get("seconds", {}) for answer in own]),
    )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Place of the first token that differs (or is missing on one side); ``None`` if there is none."""
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _drafted(arm: Arm, answers: Sequence[Answer]) -> dict[str, Any]:
    """Depth, width, nodes, promotions and regret: fixed for a chain, read from the engine otherwise."""
    if arm.chain is not None:
        known = float(arm.chain) if arm.chain else None
        width = 1.0 if arm.chain else None
        return {"depth": known, "width": width, "nodes": known, "promoted": None, "regret_nats": None}
    counters = [{k: v for k, v in answer.engine.items() if isinstance(v, (int, float))} for answer in answers]
    total = _sum_of_maps(counters)
    steps = total.get("steps", 0)
    return {
        "depth": _ratio(total.get("drafted_depth"), steps),
        "width": _ratio(total.get("drafted_width"), steps),
        "nodes": _ratio(total.get("drafted_nodes"), steps),
        "promoted": int(total["promotions"]) if "promotions" in total else None,
        "regret_nats": total.get("regret"),
    }


def _of_kind(kind: str, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[Answer]:
    return [answer for prompt, answer in zip(prompts, answers, strict=False) if prompt.kind == kind]


def _speed(answers: Sequence[Answer]) -> float | None:
    return _ratio(sum(answer.decoded for answer in answers), sum(answer.decode_seconds for answer in answers))


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _sum_of_maps(maps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in maps:
        for key, value in one.items():
            total[key] = total.get(key, 0) + value
    return total


def table(rows: Sequence[Figures], columns: int) -> Table:
    """The closing table, for a screen of so many columns (80 are enough)."""
    padding = (0, 1 if columns >= ROOMY else 0, 0, 0)
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding, header_style="bold")
    result.add_column("arm", no_wrap=True)
    for heading in ("tokens\n/s", "vs\nplain", "accepted\nlength", "depth", "width", "nodes\na step", "promo-\ntions"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("same text\nas plain")
    for row in rows:
        result.add_row(
            row.title,
            _number(row.tokens_per_second, 1),
            _number(row.ratio, 2, "x"),
            _number(row.accepted_length, 2),
            _number(row.depth, 1),
            _number(row.width, 1),
            _number(row.nodes, 1),
            "–" if row.promoted is None else str(row.promoted),
            _same(row),
        )
    return result


def by_kind(rows: Sequence[Figures]) -> str:
    """One line: the ratio to plain decoding for each kind of text."""
    parts = []
    for kind in rows[0].ratio_by_kind:
        ratios = [_number(row.ratio_by_kind[kind], 2, "x") for row in rows if row.arm != "plain"]
        parts.append(f"{kind} {' / '.join(ratios)}")
    return "; ".join(parts)


def _same(row: Figures) -> str:
    if row.same_text is None or row.arm == "plain":
        return "–"
    verdict = "yes" if row.same_text == row.prompts else "no"
    return f"{verdict} ({row.same_text} of {row.prompts})"


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def as_json(
    rows: Sequence[Figures],
    prompts: Sequence[Prompt],
    answers: Mapping[str, Sequence[Answer]],
    seconds: Mapping[str, float],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything the run measured, with where and how it ran."""
    return {
        "provenance": dict(provenance),
        "seconds": dict(seconds),
        "arms": [asdict(row) for row in rows],
        "answers": [
            {
                "kind": prompt.kind,
                "prompt": prompt.text,
                "arms": {name: asdict(own[i]) for name, own in answers.items()},
            }
            for i, prompt in enumerate(prompts)
        ],
    }
