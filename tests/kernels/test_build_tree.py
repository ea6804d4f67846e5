"""build_tree against its reference, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import InvalidTreeError, reference

IMPLEMENTATIONS = [
    pytest.param(
        ops.build_tree,
        id="native",
        marks=pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built"),
    ),
    pytest.param(reference.build_tree, id="reference"),
]


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    rows = draw(st.integers(1, 64))
    return [-1] + [draw(st.integers(0, row - 1)) for row in range(1, rows)]


def arguments(trees: list[list[int]], roots: list[int]) -> tuple[torch.Tensor, ...]:
    start = [0]
    for tree in trees:
        start.append(start[-1] + len(tree))
    flat = [parent for tree in trees for parent in tree]
    return (
        torch.arange(len(flat), dtype=torch.int32),
        torch.tensor(flat, dtype=torch.int32),
        torch.tensor(start, dtype=torch.int32),
        torch.tensor(roots, dtype=torch.int64),
    )


def walked(parents: list[int], row: int) -> list[int]:
    """The rows from ``row`` up to the root."""
    rows = []
    while row >= 0:
        rows.append(row)
        row = parents[row]
    return rows


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
@settings(deadline=None, max_examples=60)
@given(trees=st.lists(parent_lists(), min_size=1, max_size=8), base=st.integers(0, 2**40))
def test_every_row_knows_its_path_to_the_root(function, trees, base):
    roots = [base + 10 * request for request in range(len(trees))]
    tree = function(*arguments(trees, roots))
    first = 0
    for parents, root in zip(trees, roots, strict=True):
        for row in range(len(parents)):
            path = walked(parents, row)
            assert tree.depths[first + row] == len(path) - 1
            assert tree.positions[first + row] == root + len(path) - 1
            word = int(tree.ancestors[first + row]) & (2**64 - 1)
            assert word == sum(1 << ancestor for ancestor in path)
        first += len(parents)


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
def test_the_example_of_the_types(function):
    tree = function(*arguments([[-1, 0, 0, 1, 3]], [100]))
    assert tree.depths.tolist() == [0, 1, 1, 2, 3]
    assert tree.positions.tolist() == [100, 101, 101, 102, 103]
    assert tree.ancestors.tolist() == [0b00001, 0b00011, 0b00101, 0b01011, 0b11011]
    assert (tree.depths.dtype, tree.positions.dtype, tree.ancestors.dtype) == (torch.int32, torch.int64, torch.int64)


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("bad", "row", "kind"),
    [
        ([0], 0, InvalidTreeError.NO_ROOT),
        ([], 0, InvalidTreeError.NO_ROOT),
        ([-2, 0], 0, InvalidTreeError.NO_ROOT),
        ([-1, 1], 1, InvalidTreeError.PARENT_ORDER),
        ([-1, 0, 3, 1], 2, InvalidTreeError.PARENT_ORDER),
        ([-1, 0, -1], 2, InvalidTreeError.PARENT_ORDER),
        ([-1] + [0] * 64, 64, InvalidTreeError.TOO_LARGE),
    ],
)
def test_an_invalid_tree_is_named(function, bad, row, kind):
    with pytest.raises(InvalidTreeError, match=f"request 1, row {row}") as error:
        function(*arguments([[-1, 0], bad, [-1]], [0, 0, 0]))
    assert (error.value.request, error.value.row, error.value.kind) == (1, row, kind)


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
def test_an_empty_batch(function):
    assert function(*arguments([], [])).ancestors.shape == (0,)


@pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, lambda t: t.long(), "parents must be int32"),
        (1, lambda t: t.repeat_interleave(2)[::2], "parents must be contiguous"),
        (1, lambda t: t[:1].expand(4), "parents must be contiguous"),
        (2, lambda t: t[:-1], "start must have size"),
        (2, lambda t: t + 1, "past the 4 rows"),
        (2, lambda t: t.flip(0), "falls at request"),
        (3, lambda t: t.int(), "root_positions must be int64"),
        (3, lambda t: t[None], "must have 1 dimensions"),
    ],
)
def test_bad_arguments_are_refused(index, change, message):
    given_arguments = list(arguments([[-1, 0], [-1, 0]], [0, 0]))
    given_arguments[index] = change(given_arguments[index])
    with pytest.raises(RuntimeError, match=message):
        ops.build_tree(*given_arguments)
