"""Expansion in a grid on the device gives the trees of the expansion on the host, and keeps accepted rows in order."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import NO_TOKEN, GridBounds, TreeGrid, expand_grid
from adaptivespec_vllm.kv import commit_slots, plan_commit, rows_in_sequence
from adaptivespec_vllm.types import NO_TREE, DraftTree, TreeShape, VerifyResult
from tests.unit.test_draft import PathHead, expand, log_probs_of

shapes = st.one_of(st.builds(TreeShape, st.integers(1, 5), st.integers(1, 4), st.integers(1, 16)), st.just(NO_TREE))
requests_of_a_step = st.lists(st.tuples(st.integers(0, 999), shapes), min_size=1, max_size=4)


def in_a_grid(
    seeds: list[int], bounds: list[TreeShape], least: float, largest: TreeShape, head: PathHead | None = None
) -> TreeGrid:
    first = torch.tensor(np.array([log_probs_of(seed, ()) for seed in seeds]))
    values, ids = (t[:, : largest.width] for t in first.sort(dim=-1, descending=True, stable=True))
    depth, width, nodes = torch.tensor(bounds).unbind(1)
    least_value = float(np.log(least)) if least else -float("inf")
    roots = torch.full((len(seeds),), 10)
    return expand_grid(
        head or PathHead(seeds), values, ids, GridBounds(depth, width, nodes, least_value), roots, largest
    )


def tree_of(grid: TreeGrid, b: int) -> DraftTree:
    nodes = int((grid.tokens[b] != NO_TOKEN).sum())
    return DraftTree(
        tokens=grid.tokens[b, :nodes].tolist(),
        parents=grid.parents[b, 1 : nodes + 1].tolist(),
        root_position=10,
        log_probs=grid.log_probs[b, :nodes].tolist(),
    )


class TestGrid:
    @given(requests_of_a_step, st.sampled_from([0.0, 0.02, 0.2]))
    def test_trees_are_those_of_the_host(self, requests, least):
        seeds, bounds = (list(column) for column in zip(*requests, strict=True))
        grid = in_a_grid(seeds, bounds, least, TreeShape(5, 4, 16))
        trees, _ = expand(seeds, bounds, least)
        for b, tree in enumerate(trees):
            mine = tree_of(grid, b)
            assert (mine.tokens, mine.parents) == (tree.tokens, tree.parents)
            assert mine.log_probs == tree.log_probs

    @given(requests_of_a_step)
    def test_depths_and_ancestors_are_those_of_the_op(self, requests):
        seeds, bounds = (list(column) for column in zip(*requests, strict=True))
        grid = in_a_grid(seeds, bounds, 0.0, TreeShape(5, 4, 16))
        for b in range(len(seeds)):
            tree = tree_of(grid, b)
            rows = len(tree) + 1
            built = ops.build_tree(
                torch.tensor([0, *tree.tokens], dtype=torch.int32),
                torch.tensor([-1, *tree.parents], dtype=torch.int32),
                torch.tensor([0, rows], dtype=torch.int32),
                torch.tensor([10]),
            )
            assert torch.equal(grid.depths[b, :rows], built.depths)
            assert torch.equal(grid.ancestors[b, :rows], built.ancestors)
            assert grid.parents[b, 0] == -1
            assert not grid.parents[b, rows:].any()

    @pytest.mark.parametrize(("requests", "width"), [(1, 1), (1, 3), (3, 1)])
    def test_the_head_is_given_contiguous_rows(self, requests, width):
        """Ops read raw pointers: a view with stride 0 would be read beyond its end."""
        shape = TreeShape(4, width, 4)
        head = PathHead(list(range(requests)))
        in_a_grid(list(range(requests)), [shape] * requests, 0.0, shape, head)
        assert len(head.levels) == 3
        for rows in head.levels:
            for f in fields(rows):
                column = getattr(rows, f.name)
                assert column.is_contiguous() and (len(column) == 1 or column.stride(0) == 1), f.name

    def test_room_for_more_nodes_than_there_are_candidates(self):
        grid = in_a_grid([1], [TreeShape(1, 2, 9)], 0.0, TreeShape(1, 2, 9))
        assert (grid.tokens[0] != NO_TOKEN).tolist() == [True, True] + [False] * 7
        assert grid.ancestors.shape == (1, 10)

    def test_a_tree_of_63_nodes_uses_the_whole_word(self):
        shape = TreeShape(6, 6, 63)
        grid = in_a_grid([5], [shape], 0.0, shape)
        assert len(tree_of(grid, 0)) == 63
        assert grid.ancestors[0, 63] < 0


class TestCommit:
    """Two requests, roots at rows 3 and 6; the second one accepts nothing."""

    result = VerifyResult(
        paths=torch.tensor([[2, 3], [-1, -1]], dtype=torch.int32),
        lengths=torch.tensor([2, 0], dtype=torch.int32),
        next_tokens=torch.zeros(2, dtype=torch.int64),
        promotions=torch.zeros(2, dtype=torch.int32),
        regrets=torch.zeros(2),
    )
    roots = torch.tensor([2, 6])
    slots = torch.arange(100, 108)

    def test_accepted_rows_take_the_places_behind_their_root(self):
        assert rows_in_sequence(self.result, self.roots, 8).tolist() == [0, 1, 2, 4, 5, 5, 6, 7]

    def test_only_accepted_rows_are_committed(self):
        assert commit_slots(self.result, self.roots, self.slots).tolist() == [-1, -1, -1, -1, 103, 104, -1, -1]

    def test_both_say_what_the_plan_on_the_host_says(self):
        plan = plan_commit(self.result, self.roots.tolist())
        rows = rows_in_sequence(self.result, self.roots, 8).numpy()
        assert rows[plan.targets].tolist() == plan.rows.tolist()
        assert commit_slots(self.result, self.roots, self.slots).numpy()[plan.rows].tolist() == [103, 104]
