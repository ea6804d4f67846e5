"""What the pictures show, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaptivespec_vllm.bench import result as bench
from adaptivespec_vllm.bench.arms import PLAIN
from adaptivespec_vllm.eval import result as evaluation

STRICT = "strict"
PUBLISHED = "margin as published"


@dataclass(frozen=True)
class Point:
    """An arm between speed and quality.

    Attributes:
        arm: its name.
        rule: which family of rules it is verified by.
        drafts: what it drafts, without the rule.
        lost: nats a token.
        speed: tokens a step, or times plain decoding.

    """

    arm: str
    rule: str
    drafts: str
    lost: float
    speed: float


def points(rows: list[evaluation.Figures], arms: Mapping[str, Any], speeds: Mapping[str, float]) -> list[Point]:
    """Arms of one task of which both speed and loss are known; plain decoding is left out."""
    return [
        Point(row.arm, rule_of(row.arm, arms.get(row.arm)), row.arm.partition("@")[0], row.fidelity.lost, speed)
        for row in rows
        if row.fidelity.lost is not None and row.arm != PLAIN and (speed := speeds.get(row.arm)) is not None
    ]


def rule_of(arm: str, speculative: Any) -> str:
    """Family of the rule of an arm: strict, one of three kinds of margin, or the rule's name."""
    options = speculative if isinstance(speculative, Mapping) else {}
    if rule := options.get("rule"):
        return str(rule.get("name"))
    if margin := options.get("margin"):
        published = options.get("preset") == "paper" if "lookahead" not in margin else not margin["lookahead"]
        return "margin with a guard" if options.get("guard") else PUBLISHED if published else "margin"
    return STRICT


def setting_of(arm: str, rule: str) -> str:
    """What an arm's name says of its rule beyond which one it is: a kappa, keys, or nothing but the name."""
    _, marked, suffix = arm.partition("@")
    keys = suffix.removeprefix("margin:kappa=").removesuffix(",lookahead=false").removeprefix(f"{rule}:")
    return keys if marked else rule


def best(found: list[Point]) -> list[Point]:
    """Those that no other beats on both axes, the least lossy first."""
    kept: list[Point] = []
    for point in sorted(found, key=lambda p: (p.lost, -p.speed)):
        if not kept or point.speed > kept[-1].speed:
            kept.append(point)
    return kept


def tokens_a_step(rows: list[evaluation.Figures]) -> dict[str, float]:
    """By arm; of those that are known."""
    return {row.arm: row.accepted_length for row in rows if row.accepted_length is not None}


def measured(results: list[bench.Result]) -> dict[str, float]:
    """Tokens/s over plain decoding by arm, in the smallest batch of the first result that has it."""
    found: dict[str, float] = {}
    for result in results:
        place, kind = smallest(result), result.kinds()[-1]
        for row in result.figures:
            if row.place == place and row.kind == kind and row.ratio is not None:
                found.setdefault(row.arm, row.ratio.median)
    return found


def smallest(result: bench.Result) -> bench.Place:
    """The place of the smallest batch (of several contexts the shortest)."""
    return min(result.places(), key=lambda place: (place.batch, place.context or 0))


def crossover(ratios: Mapping[int, float]) -> float | None:
    """The batch size from which on an arm is no faster than plain decoding, on a logarithmic scale between two that
    were measured; None where it is still faster in the largest.

    Args:
        ratios: tokens/s over plain decoding, by batch size.

    """
    sizes = sorted(ratios)
    slower = len(sizes)
    while slower and ratios[sizes[slower - 1]] <= 1:
        slower -= 1
    if slower == len(sizes):
        return None
    if slower == 0:
        return float(sizes[0])
    low, high = sizes[slower - 1], sizes[slower]
    share = (ratios[low] - 1) / (ratios[low] - ratios[high])
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
