"""Policies that follow the published rule: table of shapes, breaker, scopes, replay, margin guard."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec_vllm.config import MAX_EXPANDED_NODES, resolve
from adaptivespec_vllm.policy import make_policy, replay
from adaptivespec_vllm.policy.guard import STRICT, allowance, held_back_by
from adaptivespec_vllm.policy.recording import Event, Recorded
from adaptivespec_vllm.policy.shape import bounded, interpolate
from adaptivespec_vllm.policy.shaped import ShapedPolicy
from adaptivespec_vllm.policy.signal import breaker, confidence_signal, rolling_acceptance, strength
from adaptivespec_vllm.types import NO_TREE, RequestSignal, StepFeedback, TreeShape

PAPER = resolve({"preset": "paper"})
ADAPTIVE = resolve({"tree": {"policy": "adaptive"}})
LOW, HIGH = TreeShape(3, 4, 3), TreeShape(7, 1, 7)

# s below the bound -> depth, width, nodes with the root counted, as published
PUBLISHED = [
    (1 / 8, (3, 4, 4)),
    (1 / 6, (4, 4, 5)),
    (3 / 8, (4, 3, 5)),
    (1 / 2, (5, 3, 6)),
    (5 / 8, (5, 2, 6)),
    (5 / 6, (6, 2, 7)),
    (7 / 8, (6, 1, 7)),
    (math.inf, (7, 1, 8)),
]

unit = st.floats(0, 1)
shapes = st.builds(TreeShape, st.integers(1, 20), st.integers(1, 20), st.integers(1, 63))
feedbacks = st.builds(
    lambda confidence, depth, extra, share: StepFeedback(
        confidence, depth, depth + extra if depth else 0, round(share * depth)
    ),
    unit,
    st.integers(0, 8),
    st.integers(0, 20),
    unit,
)


def with_root(shape: TreeShape) -> tuple[int, int, int]:
    return (shape.depth, shape.width, shape.nodes + 1)


def shapes_of(policy: ShapedPolicy, signals, confidences) -> list[TreeShape]:
    return [decision.shape for decision in policy.decide(signals, confidences)]


def published(s: float) -> tuple[int, int, int]:
    return next(shape for bound, shape in PUBLISHED if s < bound)


class TestShape:
    @pytest.mark.parametrize("bound", [bound for bound, _ in PUBLISHED[:-1]])
    @pytest.mark.parametrize("side", [-1e-9, 0.0, 1e-9])
    def test_published_table_at_its_thresholds(self, bound, side):
        assert with_root(interpolate(LOW, HIGH, bound + side, 7)) == published(bound + side)

    @given(unit)
    def test_published_table_everywhere(self, s):
        assert with_root(interpolate(LOW, HIGH, s, 7)) == published(s)

    def test_ends(self):
        assert interpolate(LOW, HIGH, 0.0, 63) == LOW
        assert interpolate(LOW, HIGH, 1.0, 63) == HIGH

    @given(shapes, shapes, unit, unit)
    def test_nodes_move_one_way(self, low, high, a, b):
        near, far = (interpolate(low, high, s, 63).nodes for s in sorted((a, b)))
        assert near <= far if low.nodes <= high.nodes else near >= far

    @given(shapes, shapes, unit, st.integers(1, 63))
    def test_always_consistent_and_within_the_cap(self, low, high, s, cap):
        shape = interpolate(low, high, s, cap)
        assert 1 <= shape.depth <= shape.nodes <= cap
        assert shape.width * (shape.depth - 1) <= MAX_EXPANDED_NODES
        assert shape.width >= 1

    @given(shapes, unit)
    def test_equal_ends_give_that_shape(self, shape, s):
        assert interpolate(shape, shape, s, 63) == bounded(shape, 63)


class TestSignal:
    def test_rolling_acceptance_is_the_published_average(self):
        assert rolling_acceptance(0.5, accepted=3, drafted_depth=4, alpha=0.3) == pytest.approx(0.575)

    def test_a_step_that_drafted_nothing_changes_nothing(self):
        assert rolling_acceptance(0.7, accepted=0, drafted_depth=0, alpha=0.3) == 0.7

    def test_dcs_is_confidence_times_acceptance(self):
        assert confidence_signal(0.8, 0.5) == pytest.approx(0.4)
        assert strength(0.4, 0.5) == pytest.approx(0.8)
        assert strength(0.9, 0.5) == 1.0

    def test_confidence_that_is_no_number_is_none(self):
        assert confidence_signal(math.nan, 0.5) == 0.0

    @given(st.lists(feedbacks, max_size=30))
    def test_signal_stays_in_bounds(self, steps):
        policy = make_policy(PAPER)
        signal = policy.signal("a")
        for step in steps:
            policy.observe({"a": step})
            assert 0.0 <= signal.acceptance <= 1.0
            assert signal.misses >= 0
            assert signal.tripped == (signal.misses >= 5)

    def test_breaker_needs_drafts_to_trip(self):
        assert breaker(4, False, accepted=0, drafted_nodes=0, steps=5) == (4, False)
        assert breaker(4, False, accepted=0, drafted_nodes=3, steps=5) == (5, True)
        assert breaker(9, True, accepted=1, drafted_nodes=3, steps=5) == (0, False)


class TestAdaptive:
    def miss(self) -> StepFeedback:
        return StepFeedback(confidence=1.0, drafted_depth=3, drafted_nodes=3, accepted=0)

    def test_five_misses_trip_the_breaker_until_something_is_accepted(self):
        policy = make_policy(resolve({"tree": {"policy": "adaptive"}, "signal": {"alpha": 0.01, "initial": 1.0}}))
        signal = policy.signal("a")
        for _ in range(4):
            policy.observe({"a": self.miss()})
        assert policy.begin(["a"], [True]).bounds([1.0]) == [HIGH]
        policy.observe({"a": self.miss()})
        assert signal.tripped
        assert policy.begin(["a"], [True]).bounds([1.0]) == [LOW]
        policy.observe({"a": StepFeedback(1.0, 3, 3, accepted=1, promotions=1)})
        assert not signal.tripped
        assert policy.begin(["a"], [True]).bounds([1.0]) == [HIGH]

    def test_a_request_that_ends_is_forgotten(self):
        policy = make_policy(ADAPTIVE)
        for _ in range(9):
            policy.observe({"a": self.miss()})
        policy.forget("a")
        assert policy.signals == {}
        assert policy.signal("a") == policy.new_signal()

    def test_a_request_that_reads_its_prompt_drafts_nothing_but_counts_in_the_mean(self):
        policy = make_policy(PAPER)
        policy.signal("b").acceptance = 0.0
        drafting = policy.begin(["a", "b"], [True, False])
        assert drafting.drafts == [True, False]
        assert [with_root(shape) for shape in drafting.bounds([0.6, 1.0])] == [published(0.3), with_root(NO_TREE)]

    def test_start_value(self):
        policy = make_policy(PAPER)
        assert policy.new_signal() == RequestSignal(acceptance=0.5)
        assert with_root(shapes_of(policy, [policy.new_signal()], [1.0])[0]) == (7, 1, 8)
        assert with_root(shapes_of(policy, [policy.new_signal()], [0.5])[0]) == (5, 2, 6)

    def test_requests_choose_for_themselves(self):
        policy = make_policy(ADAPTIVE)
        signals = [RequestSignal(1.0), RequestSignal(0.0), RequestSignal(1.0, misses=5, tripped=True)]
        assert shapes_of(policy, signals, [1.0, 1.0, 1.0]) == [HIGH, LOW, LOW]

    def test_batch_scope_takes_the_mean_signal(self):
        policy = make_policy(PAPER)
        signals = [RequestSignal(0.5), RequestSignal(1.0), RequestSignal(0.0)]
        # mean of .2, .25 and 0 over the divisor .5 is s = .3
        decisions = policy.decide(signals, [0.4, 0.25, 1.0])
        assert [with_root(decision.shape) for decision in decisions] == [published(0.3)] * 3
        assert [decision.s for decision in decisions] == pytest.approx([0.3] * 3)
        assert [decision.dcs for decision in decisions] == [0.2, 0.25, 0.0]

    @given(unit, unit, st.booleans())
    def test_a_batch_of_one_is_the_same_in_both_scopes(self, acceptance, confidence, tripped):
        signal = [RequestSignal(acceptance, tripped=tripped)]
        one, batch = make_policy(ADAPTIVE), make_policy(PAPER)
        assert shapes_of(one, signal, [confidence]) == shapes_of(batch, signal, [confidence])

    @given(st.lists(st.tuples(unit, unit), min_size=1, max_size=8), st.randoms())
    def test_batch_order_does_not_matter(self, requests, random):
        policy = make_policy(PAPER)
        shuffled = random.sample(requests, len(requests))
        first, second = (
            policy.decide([RequestSignal(a) for a, _ in order], [c for _, c in order]) for order in (requests, shuffled)
        )
        assert [decision.s for decision in first] == [decision.s for decision in second]

    def test_an_empty_batch(self):
        for config in (PAPER, ADAPTIVE):
            drafting = make_policy(config).begin([], [])
            assert (drafting.drafts, drafting.bounds([]), drafting.expand([], []), drafting.keep([])) == (
                [],
                [],
                [],
                [],
            )

    def test_a_confidence_is_missing(self):
        with pytest.raises(ValueError):
            make_policy(PAPER).begin(["a"], [True]).bounds([])

    @given(unit, unit)
    def test_cap_holds(self, acceptance, confidence):
        policy = make_policy(resolve({"tree": {"policy": "adaptive"}, "num_speculative_tokens": 5}))
        assert shapes_of(policy, [RequestSignal(acceptance)], [confidence])[0].nodes <= 5

    @given(st.lists(feedbacks, max_size=20))
    def test_equal_end_shapes_are_static(self, steps):
        shape = {"depth": 5, "width": 4, "nodes": 8}
        moving = make_policy(resolve({"tree": {"low": shape, "high": shape}}))
        fixed = make_policy(resolve({"tree": {"policy": "static", "shape": shape}}))
        for step in steps:
            for policy in (moving, fixed):
                assert policy.begin(["a"], [True]).bounds([step.confidence]) == [TreeShape(5, 4, 8)]
                policy.observe({"a": step})
            assert moving.signals == fixed.signals

    def test_unlikely_nodes_are_neither_expanded_nor_kept(self):
        policy = make_policy(resolve({"tree": {"policy": "adaptive", "min_path_probability": 0.5}}))
        drafting = policy.begin(["a", "b"], [True, True])
        values = [np.log(np.float32([0.9, 0.5, 0.49])), np.float32([])]
        assert drafting.expand(values, values) == drafting.keep(values) == [2, 0]


class TestReplay:
    def run(self, config, steps) -> list[Event]:
        log: list[Event] = []
        policy = Recorded(make_policy(config), log.append)
        for first, second in steps:
            drafting = policy.begin(["a", "b"], [True, first.drafted_depth > 0])
            drafting.bounds([first.confidence, second.confidence])
            drafting.keep([np.float32([-0.1, -4.0]), np.float32([])])
            policy.observe({"a": first, "b": second})
            if first.accepted > 3:
                policy.forget("a")
        return json.loads(json.dumps(log))

    @pytest.mark.parametrize("config", [PAPER, ADAPTIVE], ids=["paper", "adaptive"])
    @given(steps=st.lists(st.tuples(feedbacks, feedbacks), max_size=12))
    def test_same_inputs_same_log_and_the_log_replays(self, config, steps):
        log = self.run(config, steps)
        assert log == self.run(config, steps)
        assert replay(log, config) == []

    STEPS = [(StepFeedback(0.5, 3, 3, 2), StepFeedback(0.6, 4, 4, 1))] * 3

    def test_a_changed_shape_is_found(self):
        log = self.run(PAPER, self.STEPS)
        index = [event["call"] for event in log].index("bounds")
        right = log[index]["result"]["shapes"]
        log[index]["result"] = log[index]["result"] | {"shapes": [right[0], [9, 9, 9]]}
        mismatches = replay(log, PAPER)
        assert [(mismatch.index, mismatch.call) for mismatch in mismatches] == [(index, "bounds")]
        assert mismatches[0].logged["shapes"][1] == [9, 9, 9]
        assert mismatches[0].computed["shapes"] == right

    def test_another_configuration_is_found(self):
        log = self.run(PAPER, self.STEPS)
        assert replay(log, resolve({"preset": "paper", "signal": {"divisor": 1.0}}))

    def test_engines_one_after_the_other_in_a_log(self):
        log = self.run(PAPER, self.STEPS)
        assert replay(log + log, PAPER) == []

    def test_a_log_without_its_beginning(self):
        with pytest.raises(ValueError, match="before any 'start'"):
            replay(self.run(PAPER, self.STEPS)[1:], PAPER)


class TestGuard:
    def limits(self, signal: RequestSignal, **sections):
        config = resolve({"margin": {}} | sections)
        return allowance(config.margin, config.guard, signal)

    def test_no_margin_is_strict(self):
        assert self.limits(RequestSignal(1.0), margin=None) is STRICT
        assert STRICT.strict

    def test_kappa_one_is_strict(self):
        assert self.limits(RequestSignal(1.0), margin={"kappa": 1.0}).strict

    def test_unlimited_by_default(self):
        limits = self.limits(RequestSignal(0.0))
        assert limits.max_log_ratio == pytest.approx(1.6094, abs=1e-4)
        assert (limits.max_promotions, limits.max_regret) == (None, math.inf)

    def test_promotions_per_step(self):
        assert self.limits(RequestSignal(0.5), margin={"max_promotions_per_step": 1}).max_promotions == 1

    def test_low_acceptance_is_strict(self):
        guard = {"min_acceptance": 0.4}
        assert self.limits(RequestSignal(0.39), guard=guard).strict
        assert not self.limits(RequestSignal(0.4), guard=guard).strict

    def test_regret_is_a_budget(self):
        guard = {"max_regret": 2.0}
        assert self.limits(RequestSignal(0.5, regret=0.5), guard=guard).max_regret == 1.5
        assert self.limits(RequestSignal(0.5, regret=2.0), guard=guard).strict

    def test_a_rule_without_a_bound(self):
        def limits(signal: RequestSignal, **guard: float):
            config = resolve({"rule": {"name": "typical", "max_promotions_per_step": 3}, "guard": guard})
            return allowance(config.lossy, config.guard, signal), held_back_by(config.lossy, config.guard, signal)

        allowed, held = limits(RequestSignal(0.5))
        assert (allowed.max_log_ratio, allowed.max_promotions, allowed.max_regret) == (math.inf, 3, math.inf)
        assert held is None
        allowed, held = limits(RequestSignal(0.5, regret=0.5), max_regret=2.0)
        assert (allowed.max_regret, held) == (1.5, None)
        allowed, held = limits(RequestSignal(0.5, regret=2.0), max_regret=2.0)
        assert (allowed.strict, held) == (True, "max_regret")
        allowed, held = limits(RequestSignal(0.3), min_acceptance=0.4)
        assert (allowed.strict, held) == (True, "min_acceptance")

    def test_regret_adds_up(self):
        policy = make_policy(resolve({}))
        policy.observe({"a": StepFeedback(0.5, 3, 3, 2, promotions=1, regret=0.75)})
        policy.observe({"a": StepFeedback(0.5, 3, 3, 2, promotions=1, regret=0.5)})
        assert policy.signal("a").regret == 1.25
