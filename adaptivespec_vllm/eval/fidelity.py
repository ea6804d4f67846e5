"""How far a text is from that of plain decoding; no task is needed to say so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel

from adaptivespec_vllm.eval.answers import Answer

GRAM = 4
"""Tokens of a run that counts as repeated when it is seen again."""


class Fidelity(BaseModel):
    """Of the answers of an arm, against those of plain decoding to the same prompts.

    Attributes:
        same: share of answers that are the same, token for token.
        divergence: median place of the first token that differs, of answers where one does.
        promoted: share of tokens that were not the target's first choice where they stand.
        lost: log-probability (nats) a token that they gave up; it and the share are None of texts that were drawn.
        repetition: share of runs of four tokens that were there before in the answer.
        unfinished: share of answers that were cut at the longest length.
        length: tokens over those of plain decoding.

    """

    same: float
    divergence: float | None
    promoted: float | None
    lost: float | None
    repetition: float
    unfinished: float
    length: float


def divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two texts differ; None where they do not."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def repetition(tokens: Sequence[int]) -> float:
    """Share of runs of four tokens that occurred before."""
    runs = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def fidelity(answers: Sequence[Answer], plain: Sequence[Answer]) -> Fidelity:
    """Of answers to the same prompts, in the same order; at least one."""
    places = [divergence(a.tokens, p.tokens) for a, p in zip(answers, plain, strict=True)]
    differing = [place for place in places if place is not None]
    tokens = sum(len(answer.tokens) for answer in answers)
    drawn = any(answer.losses is None for answer in answers)
    losses = [nats for answer in answers for _, nats in answer.losses or []]
    return Fidelity(
        same=1.0 - len(differing) / len(places),
        divergence=float(np.median(differing)) if differing else None,
        promoted=None if drawn else len(losses) / max(1, tokens),
        lost=None if drawn else sum(losses) / max(1, tokens),
        repetition=float(np.mean([repetition(answer.tokens) for answer in answers])),
        unfinished=sum(answer.finish == "length" for answer in answers) / len(answers),
        length=tokens / max(1, sum(len(answer.tokens) for answer in plain)),
    )
