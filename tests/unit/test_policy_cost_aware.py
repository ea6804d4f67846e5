"""The cost-aware policy on a make-believe model: it finds the best rate, gives up what does not pay, and comes back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import Text, World, linear, scaled, stairs

from adaptivespec_vllm import ops
from adaptivespec_vllm.config import AdaptiveSpecConfig, resolve
from adaptivespec_vllm.draft import LevelRows, WorthOnDevice, expand_trees
from adaptivespec_vllm.policy import cost_aware, make_policy, replay
from adaptivespec_vllm.policy.base import NoDrafting
from adaptivespec_vllm.policy.cost_aware import LONGEST_WAIT, PROBE_CREDIT, PROBE_SHARE, CostAwarePolicy, CostSignal
from adaptivespec_vllm.policy.costs import UNMEASURED, Costs, CostTable
from adaptivespec_vllm.policy.recording import Event, Recorded
from adaptivespec_vllm.types import NO_TREE, NOTHING_DRAFTED, DraftTree, StepFeedback, TreeShape

GOOD, FAIR, BAD = Text(4.0, scaled(0.95, 0.95)), Text(2.5, scaled(0.85, 0.9)), Text(2.0, scaled(0.02))

MEMORY_BOUND = Costs(
    CostTable([(1, 10.0), (32, 10.5), (64, 12.0), (256, 32.0)]), linear(0.6, 0.002), linear(0.5, 0.002)
)
EVERY_ROW_COSTS = Costs(linear(24, 5), linear(2, 0.3), linear(0.9, 0.3), overhead=1.5)
TILES = Costs(stairs(10, 2, 8), linear(1, 0.05), linear(0.7, 0.05), overhead=1.0)
DEAR_HEAD = Costs(linear(10, 0.05), linear(2.5, 0.1), linear(2.2, 0.1))
TOO_DEAR = Costs(linear(10, 20), linear(0.5, 0.3), linear(0.9, 0.3))
HOPELESS = Costs(linear(1, 20), linear(2, 0.3), linear(0.9, 0.3))

FIXED = [(1, 1, 1), (1, 2, 2), (2, 2, 3), (3, 2, 4), (5, 1, 5), (4, 2, 6), (5, 4, 8), (7, 4, 16)]


def policy_of(costs: Costs, **tree) -> CostAwarePolicy:
    policy = make_policy(resolve({"tree": tree}), costs)
    assert isinstance(policy, CostAwarePolicy)
    return policy


def static(shape: tuple[int, int, int]) -> AdaptiveSpecConfig:
    named = dict(zip(("depth", "width", "nodes"), shape, strict=True))
    return resolve({"tree": {"policy": "static", "shape": named}})


class TestLateOutcomes:
    """Where a step is drafted before the one before it is known."""

    def feedback(self) -> dict[str, StepFeedback]:
        tree = DraftTree([1], [0], 0, 0.5, TreeShape(1, 1, 1), [-0.5])
        return {"a": StepFeedback(0.5, 1, 1, 1, verdicts=tree.verdicts([1]))}

    def test_they_are_counted_against_the_decisions_that_gave_them(self):
        speedups = []
        for own in (0, 1):
            policy = policy_of(MEMORY_BOUND)
            begun = [policy.begin(["a"], [True]) for _ in range(2)]
            begun[0].seconds += 100.0
            policy.observe(self.feedback(), begun[own])
            speedups.append(policy._plain)
        assert speedups[0] > speedups[1] + 5

    def test_the_log_says_which(self):
        log: list[Event] = []
        policy = Recorded(policy_of(MEMORY_BOUND), log.append)
        begun = [policy.begin(["a"], [True]) for _ in range(2)]
        for drafting in begun:
            drafting.values(np.log(np.float32([[0.5, 0.2]])), np.array([0]), 1)
        for drafting in (begun[0], NoDrafting([False]), begun[1]):
            policy.observe(self.feedback(), drafting)
        policy.begin(["a"], [True])
        events = json.loads(json.dumps(log))
        assert replay(events, policy.config) == []
        assert [e["arguments"]["drafting"] for e in events if e["call"] == "observe"] == [1, 0, 2]

    def test_a_device_ranks_by_the_same_values(self):
        policy = policy_of(MEMORY_BOUND)
        random = np.random.default_rng(0)
        for _ in range(20):
            policy.observe(self.feedback())
        policy.signal("b").expected = 9.0
        drafting = policy.begin(["a", "b"], [True, True])
        worth = WorthOnDevice(drafting.worth(), torch.from_numpy)
        log_probs = np.log(random.dirichlet(np.full(5, 0.3), size=(2, 3))).astype(np.float32)
        log_probs[0, 0, 0], log_probs[0, 0, 1] = -500.0, 0.0
        for depth in range(1, 7):
            values = drafting.values(log_probs.reshape(6, 5), np.repeat([0, 1], 3), depth).reshape(2, 3, 5)
            mine = worth(torch.from_numpy(log_probs), depth)
            np.testing.assert_allclose(mine.numpy(), values, rtol=1e-4, atol=1e-4)
        assert (mine < 0).all() and mine.isfinite().all()


class TestRate:
    @pytest.mark.parametrize(
        ("costs", "texts"),
        [
            (MEMORY_BOUND, [GOOD]),
            (EVERY_ROW_COSTS, [GOOD]),
            (EVERY_ROW_COSTS, [FAIR] * 3),
            (TILES, [FAIR] * 2),
            (DEAR_HEAD, [GOOD, FAIR, BAD]),
        ],
        ids=["memory bound", "every row costs", "every row costs, batch", "tiles", "dear head, mixed"],
    )
    def test_it_is_about_that_of_the_best_fixed_tree_or_better(self, costs, texts):
        plain = len(texts) / (costs.overhead + costs.target(len(texts)))
        fixed = [World(texts, costs).run(make_policy(static(shape)), 150) for shape in FIXED]
        world, policy = World(texts, costs), policy_of(costs)
        world.run(policy, 100)
        assert world.run(policy, 300) > 0.95 * max(plain, *fixed)

    def test_speed_up_is_measured_in_modelled_time(self):
        world, policy = World([GOOD], MEMORY_BOUND), policy_of(MEMORY_BOUND)
        rate = world.run(policy, 300)
        assert policy.speedup == pytest.approx(rate * MEMORY_BOUND.target(1), rel=0.1)
        assert policy.rate(1) == pytest.approx(rate, rel=0.1)

    def test_a_unit_of_time_is_only_a_unit(self):
        def nodes(unit: float) -> int:
            tables = {
                name: CostTable((rows, s * unit) for rows, s in getattr(TILES, name).points)
                for name in ("target", "first", "level")
            }
            costs = Costs(**tables, overhead=TILES.overhead * unit)
            world = World([GOOD, FAIR], costs)
            world.run(policy_of(costs), 60)
            return world.nodes

        assert nodes(1.0) == nodes(1 / 1024)

    def test_dearer_rows_are_fewer(self):
        counts = []
        for row in (0.01, 0.5, 2.0, 8.0):
            world = World([GOOD], costs := Costs(linear(10, row), linear(0.5, 0.01), linear(0.4, 0.01)))
            world.run(policy_of(costs), 120)
            counts.append(world.nodes)
        assert counts == sorted(counts, reverse=True) and counts[0] > 3 * counts[-1]

    def test_a_larger_batch_drafts_less_for_each_where_every_row_costs(self):
        counts = []
        for requests in (1, 4, 12):
            world = World([GOOD] * requests, EVERY_ROW_COSTS)
            world.run(policy_of(EVERY_ROW_COSTS), 120 // requests + 40)
            counts.append(world.nodes / world.steps / requests)
        assert counts == sorted(counts, reverse=True) and counts[0] > 1.5 * counts[-1]


class TestGivingUp:
    def test_a_draft_that_is_never_right_is_soon_left_alone(self):
        world, policy = World([BAD], EVERY_ROW_COSTS), policy_of(EVERY_ROW_COSTS)
        world.run(policy, 100)
        before = world.head_passes
        assert world.run(policy, 200) > 0.98 / (EVERY_ROW_COSTS.overhead + EVERY_ROW_COSTS.target(1))
        assert world.head_passes - before <= 200 // LONGEST_WAIT + 1

    def test_so_is_one_that_the_machine_has_no_time_for(self):
        world, policy = World([GOOD] * 4, TOO_DEAR), policy_of(TOO_DEAR)
        world.run(policy, 250)
        assert world.head_passes / world.steps / 4 < 0.05

    def test_probes_come_after_1_2_4_and_at_last_64_steps(self, monkeypatch):
        monkeypatch.setattr(cost_aware, "PROBE_CREDIT", 99.0)
        policy = policy_of(TOO_DEAR)
        drafted = []
        for step in range(400):
            drafting = policy.begin(["a"], [True])
            if drafting.drafts[0]:
                drafted.append(step)
            policy.observe({"a": NOTHING_DRAFTED})
        assert drafted[0] == 1
        assert np.diff(drafted).tolist()[:8] == [3, 5, 9, 17, 33, 65, 65, 65]

    def test_there_are_none_where_not_even_the_best_drafts_would_pay(self):
        """A row more costs as much as a token in each request of the batch, whatever is drafted."""
        policy = policy_of(HOPELESS)
        for _ in range(200):
            assert policy.begin(["a", "b"], [True, True]).drafts == [False, False]
            policy.observe({"a": NOTHING_DRAFTED, "b": NOTHING_DRAFTED})

    def test_they_come_back_with_costs_that_leave_hope(self):
        policy = policy_of(HOPELESS)
        for _ in range(20):
            policy.begin(["a"], [True])
        policy.costs = TOO_DEAR
        assert policy.begin(["a"], [True]).drafts == [True]

    def test_probes_take_a_small_share_of_the_time_however_dear_they_are(self):
        dear = Costs(linear(10, 0.05), linear(40, 0.1), linear(0.2, 0.1))
        world, policy = World([GOOD], dear), policy_of(dear)
        assert world.run(policy, 1500) > 0.96 * 1 / dear.target(1)
        assert 2 <= world.head_passes <= (1500 * PROBE_SHARE + PROBE_CREDIT) / 4 + 1

    def test_requests_share_what_probes_may_take(self):
        """Row by row one step of plain decoding each: the second in line waits for credit, and then has its turn."""
        policy = policy_of(Costs(linear(10, 1), linear(11, 0.3), linear(0.2, 0.1)))
        probed = []
        for _ in range(600):
            drafting = policy.begin(["a", "b"], [True, True])
            probed.append(tuple(drafting.drafts))
            policy.observe({"a": NOTHING_DRAFTED, "b": NOTHING_DRAFTED})
        in_all = [sum(column) for column in zip(*probed, strict=True)]
        assert min(in_all) >= 3 and max(in_all) <= 1.5 * min(in_all)
        assert sum(in_all) < 600 * PROBE_SHARE + 2 * PROBE_CREDIT

    def test_a_probe_verifies_one_node_at_least(self):
        policy = policy_of(TOO_DEAR)
        policy.begin(["a", "b"], [True, False])
        policy.signal("b").wait = 9
        drafting = policy.begin(["a", "b"], [True, True])
        assert drafting.drafts == [True, False]
        assert drafting.bounds([0.5, 0.5]) == [policy.shape, NO_TREE]
        drafting.values(np.log(np.float32([[0.01, 0.001]])), np.array([0]), 1)
        assert drafting.keep([np.log(np.float32([0.01, 0.001])), np.zeros(0)]) == [1, 0]

    def probe(self, correction: float, log_prob: float) -> tuple[CostAwarePolicy, CostSignal]:
        """A request, long given up, whose probe drafts one node that is accepted."""
        policy = policy_of(Costs(linear(10, 10), linear(2, 0.3), linear(0.9, 0.3)))
        signal = policy.signal("a")
        signal.expected, signal.taken = 40.0, 44.0 * correction - 4.0
        signal.wait, signal.pause = 0, 32
        drafting = policy.begin(["a"], [True])
        assert drafting.probed == {"a"} and signal.pause == 64
        values = drafting.values(np.float32([[log_prob]]), np.array([0]), 1)
        assert np.exp(values[0, 0]) == pytest.approx(0.9 * np.exp(log_prob), rel=0.01)  # as if it were new
        tree = DraftTree([1], [0], 0, 0.5, policy.shape, [log_prob])
        policy.observe({"a": StepFeedback(0.5, 1, 1, 1, verdicts=tree.verdicts([1]))})
        return policy, signal

    def test_a_probe_that_surprises_asks_for_another_at_once(self):
        policy, signal = self.probe(correction=0.1, log_prob=-0.2)
        assert (signal.wait, signal.pause) == (0, 1)
        assert policy.begin(["a"], [True]).drafts == [True]

    def test_a_success_that_was_to_be_expected_does_not(self):
        policy, signal = self.probe(correction=0.8, log_prob=-0.2)
        assert (signal.wait, signal.pause) == (64, 64)
        assert policy.begin(["a"], [True]).drafts == [False]

    def test_every_time_it_is_worth_drafting_the_wait_is_halved(self):
        policy = policy_of(MEMORY_BOUND)
        policy.signal("a").pause = 64
        waits = []
        for _ in range(8):
            assert policy.begin(["a"], [True]).drafts == [True]
            waits.append(policy.signal("a").wait)
        assert waits == [32, 16, 8, 4, 2, 1, 1, 1]

    def test_a_request_that_becomes_good_again_is_found_within_a_probe_and_a_few_steps(self):
        text = Text(4.0, scaled(0.02))
        world, policy = World([text], EVERY_ROW_COSTS), policy_of(EVERY_ROW_COSTS)
        world.run(policy, 300)
        drafting = policy.begin(["0"], [True])
        assert not drafting.drafts[0] or drafting.probed
        text.acceptance = GOOD.acceptance
        world.run(policy, 2 * LONGEST_WAIT + 30)
        nodes = world.nodes
        world.run(policy, 50)
        assert world.nodes - nodes > 40

    def test_one_bad_request_does_not_spoil_the_others(self):
        world, policy = World([GOOD, GOOD, BAD], DEAR_HEAD), policy_of(DEAR_HEAD)
        world.run(policy, 150)
        good, also_good, bad = (policy.signal(str(b)).correction for b in range(3))
        assert bad < 0.4 < 0.9 < min(good, also_good)
        drafted = np.zeros(3)
        for _ in range(50):
            world.run(policy, 1)
            drafted += world.drafted
        assert drafted[2] < 0.5 * min(drafted[:2])

    def test_promotions_count_as_accepted(self):
        policy = policy_of(MEMORY_BOUND)
        tree = DraftTree([1, 2], [0, 1], 0, 0.1, TreeShape(2, 1, 2), [-2.0, -2.0])
        for _ in range(30):
            policy.observe({"a": StepFeedback(0.1, 2, 2, 2, promotions=2, verdicts=tree.verdicts([1, 2]))})
        assert policy.signal("a").correction > 1
        assert policy.survival.g(np.exp(np.array([-2.0])), 1) > 0.4


class TestRequests:
    def test_a_request_that_ends_is_forgotten(self):
        policy = policy_of(MEMORY_BOUND)
        World([BAD], MEMORY_BOUND).run(policy, 20)
        assert policy.signal("0").correction < 0.7
        policy.forget("0")
        assert policy.signal("0") == policy.new_signal()

    def test_prompts_neither_draft_nor_count(self):
        policy = policy_of(MEMORY_BOUND)
        drafting = policy.begin(["a", "b", "c"], [False, True, False], rows=[500, 2, 300])
        assert drafting.drafts == [False, True, False]
        assert drafting.reasons["rate"] == policy.rate(1)

    def test_a_batch_of_prompts(self):
        drafting = policy_of(MEMORY_BOUND).begin(["a"], [False], rows=[500])
        assert (drafting.drafts, drafting.bounds([0.5])) == ([False], [NO_TREE])
        assert drafting.keep([np.zeros(0, dtype=np.float32)]) == [0]

    def test_rows_that_a_first_pass_would_have_to_catch_up_on_count(self):
        first = Costs(linear(10, 0.01), linear(0, 0.5), linear(0.1, 0.01))
        assert policy_of(first).begin(["a"], [True], rows=[1]).drafts == [True]
        assert policy_of(first).begin(["a"], [True], rows=[40]).drafts == [False]

    def test_a_pass_that_prompts_take_in_any_case_is_free_but_for_the_rows(self):
        costs = Costs(linear(10, 0.01), linear(30, 0.01), linear(0.1, 0.01))
        assert policy_of(costs).begin(["a", "b"], [True, False], rows=[2, 0]).drafts == [False, False]
        assert policy_of(costs).begin(["a", "b"], [True, False], rows=[2, 50]).drafts == [True, False]

    def test_the_cap_of_the_configuration_holds(self):
        policy = make_policy(resolve({"num_speculative_tokens": 5}), MEMORY_BOUND)
        assert policy.begin(["a"], [True]).bounds([0.5]) == [TreeShape(5, 4, 5)]

    def test_new_costs_from_the_next_step_on(self):
        policy = policy_of(MEMORY_BOUND)
        before = policy.rate(4)
        policy.costs = EVERY_ROW_COSTS
        assert policy.rate(4) != before


class TestReplay:
    def log(self) -> list[Event]:
        log: list[Event] = []
        policy = Recorded(policy_of(TILES), log.append)
        texts = [GOOD, Text(3.0, scaled(0.8)), BAD]
        world = World(texts, TILES)
        world.run(policy, 25)
        policy.forget("1")
        policy.costs = DEAR_HEAD
        world.run(policy, 25)
        return json.loads(json.dumps(log))

    def test_every_decision_is_computed_again(self):
        log = self.log()
        assert {event["call"] for event in log} == {
            "start", "costs", "begin", "bounds", "values", "expand", "keep", "observe", "forget",
        }  # fmt: skip
        assert replay(log, resolve({})) == []
        assert replay(log, resolve({"tree": {"costs": "no-longer-there.json"}})) == []
        assert log == self.log()

    @pytest.mark.parametrize("call", ["expand", "keep", "begin"])
    def test_a_changed_decision_is_found(self, call):
        log = self.log()
        index = max(i for i, event in enumerate(log) if event["call"] == call)
        if call == "begin":
            log[index]["result"]["drafts"][0] ^= True
        else:
            log[index]["result"][0] += 1
        assert [(mismatch.index, mismatch.call) for mismatch in replay(log, resolve({}))] == [(index, call)]

    def test_a_verdict_that_is_left_out_is_found(self):
        log = self.log()
        index = next(i for i, event in enumerate(log) if event["call"] == "observe")
        log[index]["arguments"]["feedbacks"]["0"]["verdicts"] = [[], [], []]
        assert replay(log, resolve({}))


class _OddHead:
    """Any logits at all."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def logits(self, rows: int) -> torch.Tensor:
        logits = self._random.normal(size=(rows, 6)) * self._random.choice([0, 1, 5, 60])
        odd = self._random.uniform(size=logits.shape) < 0.05
        logits[odd] = self._random.choice([-np.inf, 0.0, 1e30])
        return torch.tensor(logits, dtype=torch.float32)

    def children(self, rows: LevelRows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert (rows.start[1:] >= rows.start[:-1]).all()
        return ops.topk_logprobs(self.logits(len(rows.tokens)), width)


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    points=st.lists(
        st.tuples(st.integers(1, 60), st.floats(1e-6, 1e3)), min_size=1, max_size=4, unique_by=lambda p: p[0]
    ),
    depth=st.integers(1, 7),
    width=st.integers(1, 5),
)
@settings(max_examples=60)
def test_whatever_comes_trees_are_connected_and_within_bounds(seed, batch, points, depth, width):
    table = CostTable(sorted(points))
    policy = policy_of(Costs(table, table, UNMEASURED.level), shape={"depth": depth, "width": width})
    random, head = np.random.default_rng(seed), _OddHead(seed)
    names = [str(b) for b in range(batch)]
    for _ in range(6):
        decoding = (random.uniform(size=batch) < 0.9).tolist()
        drafting = policy.begin(names, decoding, random.integers(1, 9, batch).tolist())
        logits, k = head.logits(batch), policy.config.max_width
        values, ids = (t.contiguous() for t in logits.log_softmax(-1).topk(min(k, 6)))
        shapes = drafting.bounds([0.5] * batch)
        if random.uniform() < 0.3:
            shapes = [TreeShape(min(s.depth, 2), 1, min(s.nodes, 2)) for s in shapes]
        trees = expand_trees(head, values, ids, shapes, [3] * batch, drafting)
        feedbacks = {}
        for name, tree, shape, decodes, drafts in zip(names, trees, shapes, decoding, drafting.drafts, strict=True):
            assert drafts or not len(tree)
            assert len(tree) <= shape.nodes
            assert all(parent < row for row, parent in enumerate(tree.parents, start=1))
            depths = tree.depths()
            assert max(depths, default=0) <= shape.depth
            path: list[int] = []
            while random.uniform() < 0.6:
                children = [r for r, parent in enumerate(tree.parents, start=1) if parent == (path[-1] if path else 0)]
                if not children:
                    break
                path.append(int(random.choice(children)))
            if decodes:
                feedbacks[name] = StepFeedback(
                    tree.confidence, max(depths, default=0), len(tree), len(path), verdicts=tree.verdicts(path)
                )
        policy.observe(feedbacks)
        assert np.isfinite(policy.survival.table).all()
        assert policy.speedup >= 1
        if random.uniform() < 0.2:
            policy.forget("0")
