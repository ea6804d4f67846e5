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

    @classmethod
    def of(cls, ids: torch.Tensor, target_size: int, texts: Iterable[list[int]]) -> DraftVocabulary:
        """The vocabulary of these target ids, and how much of some texts it covers."""
        counts = Counter(token for text in texts for token in text)
        covered = sum(counts[token] for token in ids.tolist())
        return cls(ids, target_size, covered / counts.total() if counts else 0.0)

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
    texts = list(answers)
    counts = Counter(token for text in texts for token in text)
    first = dict.fromkeys(always)
    rest = (token for token in sorted(range(target_size), key=lambda t: (-counts[t], t)) if token not in first)
    return DraftVocabulary.of(torch.tensor(sorted([*first, *rest][:size])), target_size, texts)
