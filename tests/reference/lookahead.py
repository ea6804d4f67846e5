"""What the best path of a tree is worth, by trying them all."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[float]


def most_worth(
    logits: Sequence[Row],
    parents: Sequence[int],
    tokens: Sequence[int],
    margin: float,
    protected: frozenset[int] = frozenset(),
    at: int = 0,
) -> float:
    """Tokens of the best path from a row on, less two for each ``margin`` nats that its promotions give up.

    Args:
        logits: of the target, by row.
        parents: by row; row 0 is the root.
        tokens: by row.
        margin: nats that one promotion may give up.
        protected: tokens never promoted to and never passed over.
        at: the row.

    """
    found = [0.0]
    choice = logits[at].index(max(logits[at]))
    for row, parent in enumerate(parents):
        if row and parent == at and 0 <= tokens[row] < len(logits[at]):
            loss = max(logits[at]) - logits[at][tokens[row]]
            if loss == 0 or (loss <= margin and not protected & {choice, tokens[row]}):
                found.append(1 - 2 * loss / margin + most_worth(logits, parents, tokens, margin, protected, row))
    return max(found)
