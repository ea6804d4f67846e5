"""The draft vocabulary: the tokens that the target writes most often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftVocabulary:
    """Which tokens a head can propose.

    Attributes:
        ids: ``int64 [D]``, target ids in ascending order; position is the draft id.
        target_size: size of the target's vocabulary.
        coverage: share of the counted tokens that are in it.

    """

    ids: torch.Tensor
    target_size: int
    coverage: float

    @property
    def d2t(self) -> torch.Tensor:
        """``int64 [D]``: target id = draft id + d2t[draft id]."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> torch.Tensor:
        """``bool [target_size]``: whether a target token can be proposed."""
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[self.ids] = True
        return mask


def choose_vocabulary(
    answers: Iterable[list[int]], size: int, target_size: int, always: Iterable[int] = ()
) -> DraftVocabulary:
    """The ``size`` most frequent tokens of the answers; ties and unused places go to the lower ids.

    Args:
        answers: token ids of each answer.
        size: draft vocabulary, at most ``target_size``.
        target_size: size of the target's vocabulary.
        always: ids that must be in it, such as the end of a turn.

    """
    counts = Counter[int]()
    for ids in answers:
        counts.update(ids)
    first = dict.fromkeys(always)
    rest = (token for token in sorted(range(target_size), key=lambda t: (-counts[t], t)) if token not in first)
    chosen = sorted([*first, *rest][:size])
    total = sum(counts.values())
    return DraftVocabulary(torch.tensor(chosen), target_size, sum(counts[t] for t in chosen) / total if total else 0.0)
