"""Draft tokens that know their tree: parts, paths, the way through processes, and back to the tree they are of."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from adaptivespec_vllm.engine.v1.step import match_trees
from adaptivespec_vllm.types import DraftTree, TreeTokens

# root -> 11 -> 13 -> 15; root -> 12; 11 -> 14
TOKENS, PARENTS = [11, 12, 13, 14, 15], [0, 0, 1, 1, 3]


def tree() -> DraftTree:
    return DraftTree(TOKENS, PARENTS, root_position=7, log_probs=[-0.1, -0.2, -0.3, -0.4, -0.5])


def tokens() -> TreeTokens:
    return TreeTokens(TOKENS, PARENTS)


def state(part: Any) -> tuple:
    assert isinstance(part, TreeTokens)
    return list(part), part.parents, part.rows


def test_it_is_a_list_of_tokens() -> None:
    assert tokens() == TOKENS and tokens()[3] == 14 and tokens()[-1] == 15 and len(tokens()) == 5


@pytest.mark.parametrize("same", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x[:]])
def test_copies_know_their_places(same: Any) -> None:
    assert state(same(tokens())) == (TOKENS, PARENTS, [1, 2, 3, 4, 5])


def test_parts_keep_the_rows_of_the_whole() -> None:
    part = tokens().pick([0, 2, 4])
    assert state(part) == ([11, 13, 15], [0, 1, 3], [1, 3, 5])
    assert state(part[:2]) == ([11, 13], [0, 1], [1, 3])
    assert part.paths() == [[0, 1, 2]]


def test_paths_reach_every_leaf() -> None:
    assert tokens().paths() == [[1], [0, 3], [0, 2, 4]]
    assert TreeTokens([], []).paths() == [[]]
    assert {place for path in tokens().paths() for place in path} == set(range(5))


def test_as_a_text_it_ends_where_the_tree_forks() -> None:
    assert tokens().as_chain() == [11, -1, -1, -1, -1]
    assert tokens().pick([0, 2, 4]).as_chain() == [11, 13, 15]
    assert tokens().pick([1]).as_chain() == [12]
    assert TreeTokens([], []).as_chain() == []


def match(pending: DraftTree | None, sent: list[int], position: int = 7) -> tuple[DraftTree, bool]:
    step = match_trees(
        {} if pending is None else {"a": pending},
        ["a"],
        {"a": sent} if sent else {},
        computed=np.array([position]),
        scheduled=np.array([1 + len(sent)]),
        root_tokens=np.array([9, *sent]),
    )
    return step.trees[0], step.drafted[0]


def test_a_part_is_matched_to_its_tree() -> None:
    part, drafted = match(tree(), tokens().pick([0, 2, 4]))
    assert drafted
    assert (part.tokens, part.parents, part.log_probs) == ([11, 13, 15], [0, 1, 2], [-0.1, -0.3, -0.5])
    part, drafted = match(tree(), tokens().pick([0, 2, 3, 4])[:3])
    assert drafted and (part.tokens, part.parents) == ([11, 13, 14], [0, 1, 1])
    assert match(tree(), tokens()) == (tree(), True)


@pytest.mark.parametrize(
    ("pending", "position"),
    [
        (None, 7),
        (tree(), 8),
        (DraftTree([11, 12], [0, 0], 7), 7),
        (DraftTree([1, 2, 3, 4, 5], PARENTS, 7), 7),
        (DraftTree(TOKENS, [0, 1, 1, 1, 3], 7), 7),
    ],
    ids=["no tree", "moved root", "a smaller tree", "other tokens", "other parents"],
)
def test_a_part_of_another_tree_is_a_text_as_far_as_both_agree(pending: DraftTree | None, position: int) -> None:
    """Its masks follow a tree that the worker does not have: tokens behind the fork must not be accepted."""
    taken, drafted = match(pending, tokens(), position)
    assert not drafted
    assert taken.tokens == [11, -1, -1, -1, -1] and taken.parents == [0, 1, 2, 3, 4]
