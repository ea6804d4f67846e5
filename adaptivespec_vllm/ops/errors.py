"""Errors of the ops."""

from __future__ import annotations

from typing import ClassVar

from ..types import MAX_TREE_ROWS


class InvalidTreeError(ValueError):
    """A draft tree breaks the conventions of :mod:`adaptivespec_vllm.types`.

    Attributes:
        request: index of the request in the batch.
        row: first bad row within its tree.
        kind: ``NO_ROOT``, ``TOO_LARGE`` or ``PARENT_ORDER``, as the native op codes them.

    """

    NO_ROOT = 1
    TOO_LARGE = 2
    PARENT_ORDER = 3

    _REASONS: ClassVar[dict[int, str]] = {
        NO_ROOT: "the tree has no root (row 0 with parent -1)",
        TOO_LARGE: f"the tree has more than {MAX_TREE_ROWS} rows",
        PARENT_ORDER: "the parent is not an earlier row of the same tree",
    }

    def __init__(self, request: int, row: int, kind: int) -> None:
        self.request, self.row, self.kind = request, row, kind
        super().__init__(f"request {request}, row {row}: {self._REASONS[kind]}")

    @classmethod
    def from_status(cls, request: int, status: int) -> InvalidTreeError:
        """From a native status word: the kind in the low 8 bits, the row above."""
        return cls(request, status >> 8, status & 0xFF)
