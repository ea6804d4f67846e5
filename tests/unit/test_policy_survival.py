"""The calibration: it finds the true rates, stays in order, forgets slowly, and is not disturbed by odd numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec_vllm.policy.survival import KNOTS, LEVELS, MOST, Survival, probabilities_of

GRID = np.linspace(0.0, 1.0, 301)


def stream(survival: Survival, truth, steps: int, seed: int = 0, depths=(1, 2, 3, 5, 8), children: int = 6) -> None:
    """Verdicts on children of random draft probabilities, one request a step."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        p = random.uniform(0, 1, children)
        depth = random.choice(depths, children)
        taken = random.uniform(size=children) < truth(p, depth)
        survival.learn(p, depth, taken, np.zeros(children, dtype=np.int64), 1)


class TestTable:
    def test_before_anything_is_known_the_draft_is_believed_with_a_grain_of_salt(self):
        for depth in (1, 2, 3, 9):
            assert Survival().g(GRID, depth) == pytest.approx(0.9 * GRID)

    @pytest.mark.parametrize(
        "truth",
        [
            lambda p, depth: p,
            lambda p, depth: 0.3 * p,
            lambda p, depth: p**2 * 0.9 ** np.minimum(depth, 4),
            lambda p, depth: np.full_like(p, 0.5),
        ],
        ids=["honest", "too sure", "worse with depth", "knows nothing"],
    )
    def test_it_finds_the_true_rates(self, truth):
        survival = Survival()
        stream(survival, truth, 3000)
        inside = GRID[(GRID > 0.2) & (GRID < 0.95)]
        for depth in (1, 2, 3, 6):
            error = survival.g(inside, depth) - truth(inside, np.full_like(inside, depth))
            assert np.abs(error).max() < 0.12
            assert abs(error.mean()) < 0.03

    def test_depths_beyond_the_last_level_are_one(self):
        survival = Survival()
        stream(survival, lambda p, depth: p * (depth < 4), 500)
        assert (survival.g(GRID, 4) == survival.g(GRID, 60)).all()
        assert survival.g(np.array([0.8]), 4) < 0.1 < 0.6 < survival.g(np.array([0.8]), 3)

    def test_a_deeper_level_begins_with_what_the_level_above_shows(self):
        survival = Survival()
        stream(survival, lambda p, depth: 0.2 * p, 1000, depths=(1,))
        assert survival.g(np.array([0.8]), 3) < 0.3

    def test_old_verdicts_fade(self):
        survival = Survival()
        stream(survival, lambda p, depth: 0 * p, 3000)
        low = survival.g(np.array([0.8]), 1).item()
        stream(survival, lambda p, depth: p, 3000)
        assert low < 0.02
        assert survival.g(np.array([0.8]), 1).item() == pytest.approx(0.8, abs=0.1)

    def test_what_is_not_tried_any_more_comes_back_in_the_end(self):
        survival = Survival()
        stream(survival, lambda p, depth: 0 * p, 300)
        before = survival.g(np.array([0.9]), 1).item()
        nothing = np.zeros(0)
        survival.learn(nothing, nothing.astype(np.int64), nothing > 0, nothing.astype(np.int64), 8000)
        assert before < 0.1
        assert survival.g(np.array([0.9]), 1).item() == pytest.approx(0.81, abs=0.01)  # the prior

    @given(
        st.lists(
            st.lists(st.tuples(st.floats(0, 1), st.integers(1, 60), st.booleans()), min_size=1, max_size=9), max_size=20
        )
    )
    def test_always_in_order_and_between_0_and_1(self, steps):
        survival = Survival()
        for step in steps:
            p, depth, taken = (np.array(column) for column in zip(*step, strict=True))
            expected, went_on = survival.learn(p, depth, taken, np.zeros(len(p), dtype=np.int64), 1)
            assert 0 <= expected[0] <= len(p)
            assert went_on[0] == taken.sum()
        for depth in range(1, LEVELS + 2):
            g = survival.g(GRID, depth)
            assert (np.diff(g) >= 0).all()
            assert g[0] == 0 and g[-1] <= MOST
            assert (g[1:] > 0).all()
            assert np.abs(np.diff(survival.g(KNOTS[3] + np.array([-1e-9, 0, 1e-9]), depth))).max() < 1e-6

    def test_what_was_expected_and_what_came_by_request(self):
        survival = Survival()
        expected, taken = survival.learn(
            np.array([0.5, 0.2, 0.8]), np.array([1, 1, 2]), np.array([True, False, True]), np.array([0, 0, 2]), 3
        )
        assert expected == pytest.approx([0.9 * 0.7, 0, 0.9 * 0.8])
        assert taken.tolist() == [1, 0, 1]


class TestLevels:
    def test_how_many_children_of_which_probability_a_node_has(self):
        survival = Survival()
        for _ in range(2000):
            survival.look(np.array([[0.75, 0.08], [0.9, 0.08]]), 2)
        children, best = survival.children[1], survival.best_child[1]
        near = dict(zip(KNOTS.tolist(), children.tolist(), strict=True))
        assert (near[0.75], near[0.9], near[0.08]) == pytest.approx((0.5, 0.5, 1.0), abs=1e-3)
        assert children.sum() == pytest.approx(2, abs=1e-3)
        assert best.sum() == pytest.approx(1)
        assert best @ KNOTS == pytest.approx(0.825, abs=1e-3)

    def test_other_levels_keep_theirs(self):
        survival, untouched = Survival(), Survival()
        survival.look(np.array([[0.9]]), 7)
        assert (survival.children[:3] == untouched.children[:3]).all()
        assert (survival.children[3] != untouched.children[3]).any()


def test_odd_log_probabilities():
    odd = np.array([0.1, 0.0, -1e9, -np.inf, np.nan, np.inf], dtype=np.float32)
    p = probabilities_of(odd)
    assert ((p > 0) & (p <= 1)).all()
    survival = Survival()
    survival.look(p[None], 1)
    survival.learn(p, np.ones(6, dtype=np.int64), np.zeros(6, dtype=bool), np.zeros(6, dtype=np.int64), 1)
    assert np.isfinite(survival.table).all() and np.isfinite(survival.children).all()
