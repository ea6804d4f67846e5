"""Rules of other methods: hand-made cases, equality with a slow reference, and the two walks with each other."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec_vllm.config import resolve
from adaptivespec_vllm.rules import make_rule
from adaptivespec_vllm.types import DraftTree, TreeBatch, VerifyResult
from adaptivespec_vllm.verify import RequestMargin, StepwiseWalk, acceptable_part, verify_greedy
from tests.kernels.cases import batch
from tests.kernels.test_walk_trees import random_batch
from tests.reference import rules as reference

LOOSE = RequestMargin(max_log_ratio=math.inf)
# No value on the edge of a rule at the coarse logits of the random trees, where float32 and float64 could differ.
RULES = {
    "mars": ({"theta": 0.87}, reference.mars(0.87)),
    "typical": ({"epsilon": 0.0903, "delta": 0.31}, reference.typical(0.0903, 0.31)),
    "fly": ({"theta": 0.3017, "window": 2}, reference.fly(0.3017)),
}


def rule_of(name: str, **parameters: object):
    return make_rule(resolve({"rule": {"name": name, **parameters}}))


def log_rows(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def accepts(rule, row: list[float], token: int) -> bool:
    zero = torch.zeros(1, dtype=torch.int64)
    return bool(rule.acceptable(torch.tensor([row]), zero, zero + token))


class TestMars:
    def test_the_second_choice_above_theta_of_the_first(self):
        rule = rule_of("mars")
        assert accepts(rule, [10.0, 9.1, 8.0], 1)
        assert not accepts(rule, [10.0, 9.0, 8.0], 1)  # not above
        assert not accepts(rule, [10.0, 9.8, 9.7], 2)  # the third, however close

    def test_no_ratio_without_a_positive_first_logit(self):
        assert not accepts(rule_of("mars"), [-1.0, -1.05, -3.0], 1)
        assert not accepts(rule_of("mars"), [0.0, 0.0, -3.0], 1)

    def test_it_minds_a_constant_that_no_probability_minds(self):
        rule = rule_of("mars")
        assert not accepts(rule, [4.0, 3.5, 1.0], 1)
        assert accepts(rule, [14.0, 13.5, 11.0], 1)

    def test_of_equals_each_is_the_second(self):
        assert accepts(rule_of("mars"), [10.0, 9.5, 9.5], 1)
        assert accepts(rule_of("mars"), [10.0, 9.5, 9.5], 2)


class TestTypical:
    def test_a_sure_target_asks_for_epsilon(self):
        # entropy .325: .3 * exp(-.325) = .217 is more than .09
        row = torch.tensor([0.9, 0.091, 0.009]).log().tolist()
        assert accepts(rule_of("typical"), row, 1)
        assert not accepts(rule_of("typical", epsilon=0.1), row, 1)

    def test_an_unsure_target_asks_for_less(self):
        row = [0.0] * 64  # entropy ln 64: .3 / 64
        assert accepts(rule_of("typical"), row, 5)
        assert not accepts(rule_of("typical", delta=1.0), row, 5)  # exactly 1 / 64, not above it

    def test_masked_tokens_have_no_share_in_the_entropy(self):
        row = [0.0, 0.0, -math.inf, -math.inf]
        assert accepts(rule_of("typical", epsilon=0.49), row, 1)
        assert not accepts(rule_of("typical"), row, 2)


class TestFly:
    def test_the_top_three_of_the_whole_softmax(self):
        rule = rule_of("fly")
        assert accepts(rule, [1.0, 1.0, 1.0], 2)  # ln 3
        assert not accepts(rule, [9.0, 1.0, 1.0], 2)
        # Ten thousand likely tokens: the three largest hold next to nothing, and so does their entropy.
        assert not accepts(rule, [0.0] * 10_000, 2)

    def test_the_window_by_default(self):
        chain = {"policy": "static", "shape": {"depth": 5, "width": 1, "nodes": 5}}
        assert make_rule(resolve({"rule": {"name": "fly"}, "tree": chain})).window == 4
        assert rule_of("fly").window == 6  # of the default's 8 levels

    # chain 5 6 7 8; rows: exact where the row's best is the token of the next node
    CHAIN = ([[-1, 0, 1, 2, 3]], [[0, 5, 6, 7, 8]])

    def rows(self, *best: int) -> torch.Tensor:
        """A target that chooses these tokens and is unsure everywhere."""
        logits = torch.zeros(len(best), 12)
        for row, token in enumerate(best):
            logits[row, token] = 1.0
        return logits

    @pytest.mark.parametrize(
        ("best", "path", "token", "promotions"),
        [
            ((5, 9, 7, 8, 1), [1, 2, 3, 4], 1, 1),  # one mismatch, then both that follow are exact
            ((9, 6, 7, 9, 1), [1, 2, 3], 9, 1),  # the window is full before the next mismatch, which is not
            ((5, 9, 7, 9, 1), [1], 9, 0),  # the second one behind it is not exact
            ((5, 6, 9, 8, 1), [1, 2], 9, 0),  # one token behind it: no full window
            ((9, 9, 7, 8, 1), [], 9, 0),  # a mismatch in the window of another
        ],
    )
    def test_windows(self, best, path, token, promotions):
        for result in both_walks(self.rows(*best), batch(*self.CHAIN), [LOOSE], rule_of("fly", window=2)):
            assert result.paths[0, : int(result.lengths[0])].tolist() == path
            assert result.next_tokens.tolist() == [token]
            assert result.promotions.tolist() == [promotions]
            assert result.regrets.tolist() == [promotions * 1.0]

    def test_a_window_ends_with_its_request(self):
        two = batch([[-1, 0], [-1, 0, 1]], [[0, 5], [0, 6, 7]])
        logits = self.rows(9, 6, 6, 7, 1)
        for result in both_walks(logits, two, [LOOSE, LOOSE], rule_of("fly", window=1)):
            assert result.lengths.tolist() == [0, 2]


def both_walks(logits, trees, margins, rule) -> list[VerifyResult]:
    """The fused walk, and the stepwise one with the arg-max as its sampler."""
    starts = trees.start.tolist()
    drafts = [
        DraftTree(trees.tokens[a + 1 : b].tolist(), trees.parents[a + 1 : b].tolist(), 0) for a, b in pairwise(starts)
    ]
    walk = StepwiseWalk(drafts, starts[:-1], margins, [True] * len(margins), rule)
    stepwise = walk.run(logits, lambda rows, walking, emitted: (rows.argmax(-1).tolist(), rows))
    return [verify_greedy(logits, trees, margins, max(int(trees.depths.max()), 1), rule), stepwise]


def random_case(name: str, seed: int, requests: int) -> tuple[TreeBatch, torch.Tensor]:
    """Trees and logits; for fly chains, most of whose tokens are exact."""
    trees, logits = random_batch(seed, requests, chain=name == "fly")
    if name == "fly":
        exact = torch.rand(len(trees.tokens), generator=torch.Generator().manual_seed(seed)) < 0.75
        choices = torch.cat([torch.zeros(1), logits.argmax(-1)[:-1]]).int()
        trees.tokens = torch.where(exact, choices, trees.tokens)
    return trees, logits


@pytest.mark.parametrize("name", RULES)
@given(
    seed=st.integers(0, 10_000),
    requests=st.integers(1, 4),
    protected=st.sampled_from([(), (3, 7), tuple(range(20))]),
    most=st.sampled_from([None, 1, 2]),
    budget=st.sampled_from([math.inf, 1.3]),
    shift=st.sampled_from([0.0, 8.0]),
)
def test_walks_are_those_of_the_reference(name, seed, requests, protected, most, budget, shift):
    parameters, acceptable = RULES[name]
    rule = rule_of(name, **parameters)
    trees, logits = random_case(name, seed, requests)
    logits = logits + shift  # which only mars minds
    margin = RequestMargin(math.inf, most, budget, protected)
    margins = [margin if b % 3 != 2 else None for b in range(requests)]
    starts = trees.start.tolist()
    for result in both_walks(logits, trees, margins, rule):
        for b, (first, last) in enumerate(pairwise(starts)):
            parents, tokens = trees.parents[first:last].tolist(), trees.tokens[first:last].tolist()
            rows = logits[first:last].tolist()
            if margins[b] is None:
                expected = reference.walk(lambda z, x: False, 0, parents, tokens, rows)
            else:
                expected = reference.walk(
                    acceptable, rule.window, parents, tokens, rows, frozenset(protected), most, budget
                )
            path = result.paths[b, : int(result.lengths[b])].tolist()
            assert (path, int(result.next_tokens[b])) == (expected.path, expected.next_token)
            assert int(result.promotions[b]) == expected.promotions
            assert float(result.regrets[b]) == pytest.approx(expected.regret)


@pytest.mark.parametrize("name", RULES)
def test_cases_of_the_property_do_promote(name):
    """Or the test above would say nothing."""
    parameters, _ = RULES[name]
    promotions = 0
    for seed in range(40):
        trees, logits = random_case(name, seed, 4)
        for result in both_walks(logits + 8.0, trees, [LOOSE] * 4, rule_of(name, **parameters)):
            promotions += int(result.promotions.sum())
    assert promotions > 20


@pytest.mark.parametrize("name", RULES)
def test_a_row_with_a_nan_promotes_nothing(name):
    rule = rule_of(name, **RULES[name][0])
    logits = torch.zeros(4, 12)
    logits[0, 3] = math.nan
    logits[1, 6] = logits[2, 7] = 2.0
    for result in both_walks(logits, batch([[-1, 0, 1, 2]], [[0, 5, 6, 7]]), [LOOSE], rule):
        assert (result.lengths.tolist(), result.promotions.tolist()) == ([0], [0])


@pytest.mark.parametrize("name", RULES)
def test_a_forbidden_token_is_never_accepted(name):
    rule = rule_of(name, **RULES[name][0])
    logits = torch.full((4, 12), 9.0)
    logits[0, 5] = -math.inf
    logits[1, 6] = logits[2, 7] = 10.0
    for result in both_walks(logits, batch([[-1, 0, 1, 2]], [[0, 5, 6, 7]]), [LOOSE], rule):
        assert result.lengths.tolist() == [0]


def test_the_margin_is_no_rule_of_its_own():
    assert make_rule(resolve({"margin": {}})) is None
    assert make_rule(resolve({})) is None


@pytest.mark.parametrize("name", RULES)
def test_choices_may_be_other_than_the_arg_max(name):
    """As where each row's token was drawn: a child with the drawn token is exact, whatever the rule says of it."""
    rule = rule_of(name, **RULES[name][0])
    trees, logits = random_case(name, 3, 3)
    drawn = torch.full((len(logits),), 39)
    trees.tokens[1] = 39
    part = acceptable_part(logits, trees, rule, drawn)
    assert part.tokens[1] == 39
    again = acceptable_part(logits, trees, rule, logits.argmax(-1))
    assert torch.equal(again.tokens, acceptable_part(logits, trees, rule).tokens)


def test_nothing_waits_for_the_device():
    """On tensors without data an operation that needs a number on the host fails."""
    trees, logits = random_case("fly", 5, 3)
    meta = TreeBatch(**{name: getattr(trees, name).to("meta") for name in TreeBatch.__dataclass_fields__})
    for name, (parameters, _) in RULES.items():
        part = acceptable_part(logits.to("meta"), meta, rule_of(name, **parameters))
        assert part.tokens.shape == trees.tokens.shape
