"""Policies of other methods: hand-made cases, and trees against slow references."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec_vllm import ops
from adaptivespec_vllm.config import resolve
from adaptivespec_vllm.draft import expand_trees, scratch_rows_needed
from adaptivespec_vllm.policy import make_policy, replay
from adaptivespec_vllm.policy.recording import Event, Recorded
from adaptivespec_vllm.types import NOTHING_DRAFTED, StepFeedback, TreeShape
from tests.reference import policies as reference
from tests.unit.test_draft import PathHead, log_probs_of, paths_of


def grow(options: dict, seeds: list[int], bounds: TreeShape | None = None):
    """A tree for each seed by a policy that is logged, the head's rows a level, and the log."""
    config = resolve({"tree": options})
    events: list[Event] = []
    policy = Recorded(make_policy(config), lambda event: events.append(json.loads(json.dumps(event))))
    first = torch.tensor(np.array([log_probs_of(seed, ()) for seed in seeds]))
    values, ids = ops.topk_logprobs(first, config.max_width)
    head = PathHead(seeds)
    names = [str(b) for b in range(len(seeds))]
    drafting = policy.begin(names, [True] * len(seeds))
    shapes = drafting.bounds(np.exp(values[:, 0].numpy()).tolist())
    shapes = shapes if bounds is None else [bounds] * len(seeds)
    trees = expand_trees(head, values, ids, shapes, [0] * len(seeds), drafting)
    assert replay(events, config) == []
    return trees, head


class TestTalon:
    @given(
        st.lists(st.integers(0, 9_999), min_size=1, max_size=3),
        st.integers(1, 5),
        st.integers(1, 5),
        st.integers(1, 40),
        st.sampled_from([0.03, 0.2, 0.5, 1.0]),
    )
    def test_the_kept_nodes_are_those_of_the_reference(self, seeds, k, depth, n, mu):
        n = min(max(n, depth), k + (depth - 1) * k * k)
        shape = {"depth": depth, "width": k, "nodes": n}
        trees, head = grow({"policy": "talon", "shape": shape, "mu": mu}, seeds)
        for seed, tree in zip(seeds, trees, strict=True):
            kept = reference.talon(partial(log_probs_of, seed), k, n, mu, depth)
            assert dict.fromkeys(paths_of(tree), True) == dict.fromkeys(kept, True)
            values = [kept[path] for path in paths_of(tree)]
            assert values == sorted(values, reverse=True)  # any prefix is a good tree
        for rows in head.levels:
            assert int((rows.start[1:] - rows.start[:-1]).max()) <= n

    @given(
        st.integers(0, 9_999), st.builds(TreeShape, st.integers(1, 4), st.integers(1, 3), st.integers(1, 20)), st.data()
    )
    def test_a_request_with_bounds_of_its_own(self, seed, own, data):
        """They are kept to, and the nodes that the head runs over fit the scratch that is reserved for them."""
        mu = data.draw(st.sampled_from([0.001, 0.2]))
        trees, head = grow({"policy": "talon", "shape": {"depth": 4, "width": 3, "nodes": 21}, "mu": mu}, [seed], own)
        (tree,) = trees
        assert len(tree) <= own.nodes and max(tree.depths()) <= own.depth
        expanded = sum(len(rows.tokens) for rows in head.levels)
        assert expanded <= scratch_rows_needed([own], beam=21)

    def test_a_level_may_be_wider_than_k(self):
        trees, head = grow({"policy": "talon", "shape": {"depth": 3, "width": 3, "nodes": 21}, "mu": 0.001}, [4])
        assert [len(rows.tokens) for rows in head.levels] == [3, 9]
        assert len(trees[0]) == 21

    def test_a_sharp_draft_gets_a_chain_below_its_first_level(self):
        options = {"policy": "talon", "shape": {"depth": 4, "width": 3, "nodes": 12}, "mu": 1.0}
        trees, _ = grow(options, [1])
        assert [trees[0].depths().count(d) for d in (1, 2, 3, 4)] == [3, 1, 1, 1]

    def test_defaults_are_the_published_ones(self):
        tree = resolve({"tree": {"policy": "talon"}}).tree
        assert (tree.shape.width, tree.mu, tree.shape.nodes) == (10, 0.03, 60)


class TestDdd:
    @given(
        st.integers(0, 9_999),
        st.integers(1, 4),
        st.integers(2, 5),
        st.sampled_from([0.0, -0.1, -0.4, -1.0, -3.0]),
    )
    def test_depth_follows_what_the_frontier_holds(self, seed, width, depth, threshold):
        nodes = min(12, width + (depth - 1) * width * width)
        nodes = max(nodes, depth)
        shape = {"depth": depth, "width": width, "nodes": nodes}
        trees, head = grow({"policy": "ddd", "shape": shape, "threshold": threshold}, [seed])
        expected = reference.ddd_depth(partial(log_probs_of, seed), width, nodes, threshold, depth)
        assert len(head.levels) + 1 == expected
        assert max(trees[0].depths()) <= expected

    def test_a_request_stops_by_itself(self):
        options = {"policy": "ddd", "threshold": -0.3, "shape": {"depth": 6, "width": 4, "nodes": 30}}
        alone = [grow(options, [seed])[0][0] for seed in range(6)]
        together, _ = grow(options, list(range(6)))
        assert together == alone
        assert len({max(tree.depths()) for tree in alone}) > 1


def feedback(accepted: int, length: int) -> StepFeedback:
    return StepFeedback(0.5, length, length, accepted)


class TestSglang:
    def policy(self, **keys: object):
        return make_policy(resolve({"tree": {"policy": "sglang-adaptive", **keys}}))

    def shape(self, policy) -> tuple[int, int, int]:
        drafting = policy.begin(["a"], [True])
        (shape,) = drafting.bounds([0.5])
        return tuple(shape)

    def test_it_begins_in_the_middle_of_the_list(self):
        assert self.shape(self.policy()) == (5, 1, 5)
        assert self.shape(self.policy(lengths=[2, 4])) == (4, 1, 4)

    def test_nothing_changes_before_the_warm_up_and_between_choices(self):
        policy = self.policy()
        lengths = []
        for _ in range(20):
            policy.observe({"a": feedback(0, 5)})
            lengths.append(policy.length)
        # The average falls from 4 by a fifth each step: .14 after 15 steps is under every threshold.
        assert lengths == [5] * 14 + [1] * 6

    def test_all_accepted_makes_it_longer_one_length_at_a_time(self):
        policy = self.policy(warmup=0, interval=1, alpha=1.0)
        lengths = []
        for accepted in (5, 7, 7):
            policy.observe({"a": feedback(accepted, policy.length)})
            lengths.append(policy.length)
        assert lengths == [7, 7, 7]

    @pytest.mark.parametrize(("average", "length"), [(2.25, 3), (2.26, 5), (4.5, 5), (4.51, 7), (0.25, 1), (0.26, 3)])
    def test_thresholds(self, average, length):
        # From 5: down to 3 at 3 - .75 or less, on to 1 at 1 - .75 or less; up to 7 above 5 - .5.
        policy = self.policy(warmup=0, interval=1, alpha=1.0)
        share = round(average * 100)
        policy.observe({str(i): feedback(share // 100 + (i < share % 100), 5) for i in range(100)})
        assert policy.length == length

    def test_steps_without_drafts_say_nothing(self):
        policy = self.policy(warmup=0, interval=1, alpha=1.0)
        policy.observe({"a": NOTHING_DRAFTED})
        assert policy.length == 5

    def test_all_requests_share_the_length(self):
        policy = self.policy()
        shapes = policy.begin(["a", "b"], [True, True]).bounds([0.1, 0.9])
        assert shapes == [(5, 1, 5)] * 2

    def test_defaults_are_the_published_ones(self):
        tree = resolve({"tree": {"policy": "sglang-adaptive"}}).tree
        assert (tree.lengths, tree.alpha) == ((1, 3, 5, 7), 0.2)
        assert (tree.interval, tree.warmup) == (5, 10)
