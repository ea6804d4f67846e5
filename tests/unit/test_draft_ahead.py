"""Trees drafted ahead and grown from what was recorded, against a live head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from path_head import PathHead, log_probs_of

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import Ahead, AheadRows, RecordedHead, draft_ahead, expand_trees
from adaptivespec_vllm.types import NO_TREE, TreeShape


class Everything:
    """Steers a tree to its full shape."""

    beam = None

    def values(self, log_probs, owners, depth):
        return log_probs

    def expand(self, frontiers, candidates):
        return [len(values) for values in frontiers]

    def keep(self, candidates):
        return [len(values) for values in candidates]


class Contrary(Everything):
    """Wants the least likely trees: what a node is worth has little to do with its probability."""

    def values(self, log_probs, owners, depth):
        return (-0.1 * np.arange(log_probs.shape[1]) - 0.01 * np.abs(log_probs[:, :1])).astype(np.float32)


class PathDeviceHead:
    """A head whose output follows from the tokens since the root."""

    def __init__(self, seeds: list[int]) -> None:
        self._seeds = seeds
        self._paths: list[list[tuple[int, ...]]] = [[()] for _ in seeds]
        self.calls: list[AheadRows] = []

    def children_of(self, rows: AheadRows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(rows)
        self._paths = [
            [(*before[parent], token) for token, parent in zip(tokens, parents, strict=True)]
            for before, tokens, parents in zip(self._paths, rows.tokens.tolist(), rows.parents.tolist(), strict=True)
        ]
        values = [
            [log_probs_of(seed, path) for path in paths] for seed, paths in zip(self._seeds, self._paths, strict=True)
        ]
        log_probs = torch.tensor(np.array(values))
        best, ids = ops.topk_logprobs(log_probs.flatten(0, 1), width)
        return best.view(len(values), -1, width), ids.view(len(values), -1, width)


def first_level(seeds, width):
    return ops.topk_logprobs(torch.tensor(np.array([log_probs_of(seed, ()) for seed in seeds])), width)


def grow(seeds, shapes, width, depth, steering, requests=None):
    """The same trees by a live head and from a record."""
    log_probs, tokens = first_level(seeds, width)
    roots = [10 + b for b in range(len(seeds))]
    live = expand_trees(PathHead(seeds), log_probs, tokens, shapes, roots, steering)
    requests = list(range(len(seeds))) if requests is None else requests
    head = PathDeviceHead([seeds[b] for b in requests])
    ahead = draft_ahead(head, log_probs[requests], tokens[requests], depth)
    recorded = RecordedHead(ahead, requests)
    return live, expand_trees(recorded, log_probs, tokens, shapes, roots, steering, recorded.expandable), head


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 30))
def test_the_record_gives_the_trees_of_a_live_head(seeds, depth, width, nodes):
    shape = TreeShape(depth, width, max(nodes, depth))
    live, ahead, head = grow(seeds, [shape] * len(seeds), width, depth, Everything())
    assert ahead == live
    assert len(head.calls) == depth - 1


def test_requests_that_do_not_draft_are_not_in_the_record():
    shape = TreeShape(4, 3, 20)
    live, ahead, _ = grow([1, 2, 3, 4], [NO_TREE, shape, NO_TREE, shape], 3, 4, Everything(), requests=[1, 3])
    assert ahead == live
    assert [len(tree) for tree in ahead] == [0, 20, 0, 20]


@given(st.integers(0, 300))
def test_smaller_shapes_than_were_drafted_are_cut_out_of_the_record(seed):
    _, ahead, _ = grow([seed, seed + 1], [TreeShape(2, 1, 2), TreeShape(3, 4, 30)], 4, 5, Everything())
    assert max(ahead[0].depths()) <= 2
    assert max(ahead[1].depths()) == 3
    assert len(ahead[1]) == 30


@given(st.integers(0, 300))
def test_a_policy_with_other_wishes_still_gets_trees(seed):
    """What it wants but was not expanded has no children; no node is made up."""
    shape = TreeShape(4, 4, 40)
    _, (tree,), _ = grow([seed], [shape], 4, 4, Contrary())
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)
    paths = [()]
    for parent, token, log_prob in zip(tree.parents, tree.tokens, tree.log_probs, strict=True):
        assert log_prob == pytest.approx(log_probs_of(seed, paths[parent])[token], abs=1e-5)
        paths.append((*paths[parent], token))


def test_ancestor_words_follow_the_parents():
    width, depth = 3, 5
    *_, head = grow([7, 8], [TreeShape(depth, width, 60)] * 2, width, depth, Everything())
    for tree in range(2):
        words = [[0]]
        for level, rows in enumerate(head.calls):
            assert rows.depth == level + 1
            above = words[-1] if level else [0] * width
            wanted = [above[p] | 1 << (level * width + w) for w, p in enumerate(rows.parents[tree].tolist())]
            assert rows.ancestors[tree].tolist() == wanted
            words.append(wanted)


def test_one_level_needs_no_pass():
    live, ahead, head = grow([5], [TreeShape(1, 4, 4)], 4, 1, Everything())
    assert ahead == live
    assert head.calls == []


def test_it_never_looks_at_a_number():
    """On tensors without data every look fails."""

    class Blind:
        def children_of(self, rows, width):
            shape = (*rows.tokens.shape, width)
            return torch.empty(shape, device="meta"), torch.empty(shape, dtype=torch.int64, device="meta")

    first = torch.empty(3, 4, device="meta"), torch.empty(3, 4, dtype=torch.int64, device="meta")
    ahead = draft_ahead(Blind(), *first, 4)
    assert isinstance(ahead, Ahead)
    assert ahead.child_tokens.shape == (3, 3, 4, 4)
