"""Expansion and pool: EAGLE-2's rule against growing everything, what the head is given, what the policy is asked."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from path_head import PathHead, log_probs_of

from adaptivespec_vllm.config import resolve
from adaptivespec_vllm.draft import expand_trees
from adaptivespec_vllm.policy import make_policy
from adaptivespec_vllm.types import NO_TREE, NO_VERDICTS, DraftTree, TreeShape


def expand(seeds, shapes, least=0.0, roots=None) -> tuple[list[DraftTree], PathHead]:
    first = torch.tensor(np.array([log_probs_of(seed, ()) for seed in seeds]))
    values, ids = first.sort(dim=-1, descending=True, stable=True)
    policy = make_policy(resolve({"tree": {"policy": "adaptive", "min_path_probability": least}}))
    head = PathHead(seeds)
    drafting = policy.begin([str(b) for b in range(len(seeds))], [True] * len(seeds))
    return expand_trees(head, values, ids, shapes, roots or [10] * len(seeds), drafting), head


def everything(seed: int, shape: TreeShape, least: float) -> list[tuple[tuple[int, ...], float]]:
    """EAGLE-2 without a thought: grow all levels, keep the best nodes of all."""
    candidates: list[tuple[tuple[int, ...], float]] = []
    frontier = [((), np.float32(0))]
    for _ in range(shape.depth):
        level = []
        for path, value in frontier:
            log_probs = log_probs_of(seed, path)
            for token in np.argsort(-log_probs, kind="stable")[: shape.width].tolist():
                level.append(((*path, token), value + log_probs[token]))
        candidates += level
        frontier = sorted(level, key=lambda node: -node[1])[: shape.width]
    kept = sorted(candidates, key=lambda node: -node[1])[: shape.nodes]
    return [node for node in kept if node[1] >= (math.log(least) if least else -math.inf)]


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


shapes = st.builds(TreeShape, st.integers(1, 5), st.integers(1, 4), st.integers(1, 16))


class TestExpansion:
    @given(st.lists(st.tuples(st.integers(0, 999), shapes), min_size=1, max_size=3), st.sampled_from([0.0, 0.02, 0.2]))
    def test_the_kept_nodes_are_those_of_a_tree_that_grew_in_full(self, requests, least):
        seeds, bounds = (list(column) for column in zip(*requests, strict=True))
        trees, _ = expand(seeds, bounds, least)
        for seed, shape, tree in zip(seeds, bounds, trees, strict=True):
            expected = everything(seed, shape, least)
            assert paths_of(tree) == [path for path, _ in expected]
            assert tree.log_probs == pytest.approx(
                [log_probs_of(seed, path[:-1])[path[-1]] for path, _ in expected], abs=1e-5
            )
            assert tree.confidence == pytest.approx(np.exp(log_probs_of(seed, ()).max()))
            assert tree.shape == shape

    def test_a_request_that_drafts_nothing_costs_nothing(self):
        trees, head = expand([1, 2, 3], [TreeShape(3, 2, 4), NO_TREE, TreeShape(1, 2, 2)])
        alone, _ = expand([1], [TreeShape(3, 2, 4)])
        assert trees[0] == alone[0]
        assert (len(trees[1]), len(trees[2])) == (0, 2)
        for rows in head.levels:
            assert rows.start.tolist()[1:] == [len(rows.tokens)] * 3

    def test_nobody_drafts(self):
        trees, head = expand([1, 2], [NO_TREE, NO_TREE], roots=[4, 9])
        assert [(len(tree), tree.root_position) for tree in trees] == [(0, 4), (0, 9)]
        assert head.levels == []

    def test_rows_of_a_level(self):
        _, head = expand([5], [TreeShape(4, 2, 16)], roots=[7])
        assert [rows.positions.tolist() for rows in head.levels] == [[7, 7], [8, 8], [9, 9]]
        scratch = [row for rows in head.levels for row in rows.scratch_rows.tolist()]
        assert scratch == list(range(6))
        for rows in head.levels:
            for row, mask in zip(rows.scratch_rows.tolist(), rows.ancestors.tolist(), strict=True):
                assert mask >> row == 1  # itself is the last of its ancestors


class TestSteering:
    class Half:
        """Expands one node a request and keeps two; values are half of what the draft says."""

        beam = None

        def __init__(self) -> None:
            self.calls: list = []

        def values(self, log_probs, owners, depth):
            self.calls.append((depth, owners.tolist()))
            return log_probs / 2

        def expand(self, frontiers, candidates):
            for values in (*frontiers, *candidates):
                assert (np.diff(values) <= 0).all()
            return [min(1, len(values)) for values in frontiers]

        def keep(self, candidates):
            return [min(2, len(values)) for values in candidates]

    def test_it_says_what_nodes_are_worth_how_many_grow_and_how_many_stay(self):
        first = torch.tensor(np.array([log_probs_of(seed, ()) for seed in (1, 2, 3)]))
        values, ids = first.sort(dim=-1, descending=True)
        steering, head = self.Half(), PathHead([1, 2, 3])
        bounds = [TreeShape(3, 4, 9), NO_TREE, TreeShape(2, 4, 9)]
        trees = expand_trees(head, values, ids, bounds, [0, 0, 0], steering)
        assert steering.calls == [(1, [0, 2]), (2, [0, 2]), (3, [0])]
        assert [len(tree) for tree in trees] == [2, 0, 2]
        assert trees[0].log_probs[0] == pytest.approx(float(values[0, 0]))  # as the draft said, not halved
        assert trees[0].confidence == pytest.approx(math.exp(values[0, 0]))


class TestVerdicts:
    #      root -> a, b;  a -> c, d;  b -> e;  c -> f
    TREE = DraftTree([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 2, 3], 9, log_probs=[-0.1, -0.2, -0.3, -0.4, -0.5, -0.6])

    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ([], ([-0.1, -0.2], [1, 1], [False, False])),
            ([2], ([-0.1, -0.2, -0.5], [1, 1, 2], [False, True, False])),
            ([1, 3], ([-0.1, -0.2, -0.3, -0.4, -0.6], [1, 1, 2, 2, 3], [True, False, True, False, False])),
            ([1, 3, 6], ([-0.1, -0.2, -0.3, -0.4, -0.6], [1, 1, 2, 2, 3], [True, False, True, False, True])),
        ],
    )
    def test_children_of_reached_nodes_and_no_others(self, path, expected):
        assert self.TREE.verdicts(path) == expected

    def test_of_a_tree_that_was_cut(self):
        assert self.TREE.cut(3).verdicts([1]) == ([-0.1, -0.2, -0.3], [1, 1, 2], [True, False, False])

    def test_of_a_chain_that_nobody_drafted(self):
        assert DraftTree.chain([1, 2], 0).verdicts([1]) == NO_VERDICTS
