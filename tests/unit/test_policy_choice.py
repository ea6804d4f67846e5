"""The choices against brute force: every connected set of nodes, every set of frontier nodes, every set of requests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import linear

from adaptivespec_vllm.policy.choice import (
    gain_of_children,
    gain_of_drafting,
    nodes_to_expand,
    nodes_to_keep,
    price_of_a_row,
    requests_to_draft,
)
from adaptivespec_vllm.policy.costs import CostTable
from adaptivespec_vllm.policy.survival import MOST, Survival

# a tree: for each node its parent (an earlier row, 0 the root) and the probability that it is taken then
trees = st.lists(st.tuples(st.integers(0, 5), st.floats(0.01, MOST)), max_size=6).map(
    lambda nodes: [(min(parent, row), p) for row, (parent, p) in enumerate(nodes)]
)
tables = st.lists(st.tuples(st.integers(1, 20), st.floats(0.01, 5.0)), min_size=1, max_size=6, unique_by=lambda p: p[0])
rates = st.floats(0.0, 5.0)


def survivals(tree) -> np.ndarray:
    values = [1.0]
    for parent, p in tree:
        values.append(values[parent] * p)
    return np.array(values[1:])


def connected_sets(tree):
    for size in range(len(tree) + 1):
        for rows in itertools.combinations(range(1, len(tree) + 1), size):
            if all(tree[row - 1][0] in (0, *rows) for row in rows):
                yield rows


class TestKeep:
    @given(st.lists(trees, min_size=1, max_size=2), tables.map(sorted), rates)
    @settings(max_examples=150)
    def test_no_choice_of_connected_trees_is_better(self, batch, points, rate):
        target, base = CostTable(points), len(batch)

        def score(tokens: float, nodes: int) -> float:
            return tokens - rate * target(base + nodes)

        of_each = [
            [(len(rows), sum(survivals(tree)[row - 1] for row in rows)) for rows in connected_sets(tree)]
            for tree in batch
        ]
        best = max(
            score(sum(tokens for _, tokens in choice), sum(nodes for nodes, _ in choice))
            for choice in itertools.product(*of_each)
        )
        ranked = [np.sort(survivals(tree))[::-1] for tree in batch]
        counts = nodes_to_keep([np.log(values) for values in ranked], base, rate, target)
        tokens = sum(values[:count].sum() for values, count in zip(ranked, counts, strict=True))
        assert score(tokens, sum(counts)) == pytest.approx(best, abs=1e-9)

    @given(st.lists(trees, min_size=1, max_size=4), tables.map(sorted), rates, rates)
    def test_dearer_time_never_keeps_more(self, batch, points, a, b):
        values = [np.log(np.sort(survivals(tree))[::-1]) for tree in batch]
        more, fewer = (sum(nodes_to_keep(values, len(batch), rate, CostTable(points))) for rate in sorted((a, b)))
        assert fewer <= more

    @given(trees, st.floats(0, 1), st.floats(0.01, 1), st.integers(1, 20), st.integers(1, 20))
    def test_a_larger_batch_never_keeps_more_a_request_where_every_row_costs(self, tree, fixed, row, a, b):
        target, values = linear(fixed, row), np.log(np.sort(survivals(tree))[::-1])
        counts = [nodes_to_keep([values] * n, n, n / target(n), target) for n in sorted((a, b))]
        assert len(set(counts[0])) == len(set(counts[1])) == 1 or len(values) == 0  # equal requests, equal trees
        assert counts[1][0] <= counts[0][0]

    def test_a_step_of_the_table_is_filled(self):
        """Rows up to a full tile are free: the next tile must pay for itself as a whole."""
        target = CostTable([(1, 1.0), (4, 1.0), (5, 2.0), (8, 2.0)])
        values = [np.log([0.9, 0.5, 0.2, 0.19, 0.18, 0.17])]
        assert nodes_to_keep(values, 1, 0.5, target) == [6]  # the last three bring .54
        assert nodes_to_keep(values, 1, 0.6, target) == [3]

    def test_ties_go_to_the_earlier_request(self):
        target = CostTable([(1, 1.0), (4, 1.0), (5, 9.0), (6, 17.0)])
        assert nodes_to_keep([np.log([0.5, 0.5]), np.log([0.5, 0.5])], 2, 1.0, target) == [2, 0]

    def test_nodes_that_must_be_kept(self):
        values = [np.log([0.9, 0.8]), np.log([0.01, 0.009]), np.zeros(0)]
        least = np.array([False, True, True])
        assert nodes_to_keep(values, 3, 1.0, linear(0, 0.5), least) == [2, 1, 0]
        assert nodes_to_keep(values, 3, 1.0, linear(0, 5), least) == [0, 1, 0]

    def test_nothing_to_choose_from(self):
        assert nodes_to_keep([], 0, 0.0, linear(1, 1)) == []
        assert nodes_to_keep([np.zeros(0)] * 2, 2, 1.0, linear(1, 1)) == [0, 0]


class TestPriceOfARow:
    def test_where_rows_cost_it_is_their_time(self):
        assert price_of_a_row([np.log([0.9, 0.1])], 1, 1.0, linear(0, 0.3), 4) == pytest.approx(0.3)

    def test_where_there_is_no_room_it_is_the_least_likely_node_that_has_to_go(self):
        target = CostTable([(1, 1.0), (3, 1.0), (4, 99.0), (5, 999.0)])
        assert price_of_a_row([np.log([0.9, 0.4, 0.3])], 1, 1.0, target, 1) == pytest.approx(0.4)

    def test_free_rows_cost_nothing(self):
        assert price_of_a_row([np.log([0.9])], 1, 1.0, CostTable([(1, 1.0), (64, 1.0)]), 3) == 0.0


class TestExpand:
    @given(
        st.lists(st.lists(st.floats(0, 1), max_size=3), min_size=1, max_size=3),
        tables.map(sorted),
        rates,
    )
    def test_no_set_of_frontier_nodes_is_better(self, gains, points, rate):
        level = CostTable(points)
        flat = [gain for request in gains for gain in request]
        best = max(
            sum(chosen) - (rate * level(len(chosen)) if chosen else 0.0)
            for size in range(len(flat) + 1)
            for chosen in itertools.combinations(flat, size)
        )
        ordered = [sorted(request, reverse=True) for request in gains]
        counts = nodes_to_expand(
            np.array([g for request in ordered for g in request]), list(map(len, gains)), rate, level
        )
        mine = sum(sum(request[:count]) for request, count in zip(ordered, counts, strict=True))
        assert mine - (rate * level(sum(counts)) if any(counts) else 0.0) == pytest.approx(best, abs=1e-9)

    @given(
        st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4),
        st.floats(0, 1),
        st.floats(0.2, 3),
        st.floats(0, 1),
    )
    def test_the_gain_is_the_expectation_over_the_children_that_may_come(self, knots, reached, correction, price):
        """Two children, drawn independently; a child that is not worth its row is left out."""
        g, chance = (np.array(column) for column in zip(*knots, strict=True))
        chance = (chance + 0.01) / (chance + 0.01).sum()
        expected = sum(
            chance[i] * chance[j] * sum(max(0.0, reached * min(correction * g[k], MOST) - price) for k in (i, j))
            for i, j in itertools.product(range(len(g)), repeat=2)
        )
        gain = gain_of_children(np.array([reached]), g, 2 * chance, np.array([correction]), price)
        assert gain.tolist() == pytest.approx([expected])

    def test_a_level_must_pay_as_a_whole(self):
        level = linear(0.5, 0.0)
        assert nodes_to_expand(np.array([0.3, 0.1]), [1, 1], 1.0, level) == [0, 0]
        assert nodes_to_expand(np.array([0.3, 0.1, 0.2]), [2, 1], 1.0, level) == [2, 1]
        assert nodes_to_expand(np.zeros(0), [0, 0], 1.0, level) == [0, 0]


class TestDrafting:
    def gain(self, price: float = 0.1, level_price: float = 0.05, depth: int = 8, correction=(1.0,)) -> list[float]:
        survival = Survival()
        return gain_of_drafting(
            survival.table,
            survival.children,
            survival.best_child,
            np.array(correction),
            price,
            level_price,
            depth,
        ).tolist()

    def test_one_level_by_hand(self):
        """Before anything is known: children of .55, .18, .08, .03, taken with .9 of that."""
        assert self.gain(price=0.1, depth=1) == pytest.approx([0.9 * 0.55 - 0.1 + 0.9 * 0.18 - 0.1])

    def test_two_levels_by_hand(self):
        reached = 0.9 * 0.55
        second = reached * 0.9 * (0.55 + 0.18) - 2 * 0.05
        assert self.gain(price=0.05, level_price=0.1, depth=2) == pytest.approx(
            [0.9 * (0.55 + 0.18 + 0.08) - 3 * 0.05 + second - 0.1]
        )

    def test_reaching_a_node_gets_less_likely_with_every_level(self):
        brings = [(0.9 * 0.55) ** level * 0.9 * (0.55 + 0.18 + 0.08 + 0.03) for level in range(4)]
        assert self.gain(price=0.0, level_price=0.0) == pytest.approx([sum(brings)])

    def test_levels_that_do_not_pay_do_not_count(self):
        assert self.gain(level_price=1.0) == self.gain(depth=1)

    def test_a_better_request_gains_more(self):
        gains = self.gain(correction=(0.1, 0.5, 1.0, 1.5))
        assert gains == sorted(gains) and gains[0] == 0.0 < gains[1]

    @given(
        st.lists(st.tuples(st.floats(0, 1), st.integers(1, 8)), min_size=1, max_size=5),
        st.integers(0, 9),
        st.floats(0, 1),
        st.floats(0, 1),
    )
    def test_no_set_of_requests_is_better_where_rows_cost_alike(self, requests, base, fixed, rate):
        """Exact where the requests have as many rows each."""
        gains = np.array([gain for gain, _ in requests])
        rows = np.full(len(requests), requests[0][1])
        first = linear(fixed, 0.1)
        sunk = first(base) if base else 0.0

        def score(chosen) -> float:
            spent = first(base + rows[0] * len(chosen)) - sunk if chosen else 0.0
            return sum(gains[b] for b in chosen) - rate * spent

        sets = [c for size in range(len(gains) + 1) for c in itertools.combinations(range(len(gains)), size)]
        mine = tuple(np.flatnonzero(requests_to_draft(gains, rows, base, rate, first)).tolist())
        assert score(mine) == pytest.approx(max(map(score, sets)), abs=1e-9)
