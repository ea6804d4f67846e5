"""Looking ahead: hand-made trees, and every path of random ones tried."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from adaptivespec_vllm.types import TreeBatch, VerifyResult
from adaptivespec_vllm.verify import RequestMargin, verify_greedy
from tests.kernels.cases import batch
from tests.kernels.test_walk_trees import random_batch
from tests.reference.lookahead import most_worth

KAPPA = 0.1
CAP = math.log(1 / KAPPA)
MARGIN = RequestMargin(CAP, lookahead=True)
EOS = 11


def rows(*choices: dict[int, float]) -> torch.Tensor:
    """A row a node: the target's choice has logit 0, others what is given; whatever is not named is out of reach."""
    logits = torch.full((len(choices), 12), -50.0)
    for row, values in zip(logits, choices, strict=True):
        for token, value in values.items():
            row[token] = value
    return logits


def walk(logits: torch.Tensor, trees: TreeBatch, *margins: RequestMargin | None) -> VerifyResult:
    return verify_greedy(logits, trees, margins, int(trees.depths.max()))


def path(result: VerifyResult) -> list[int]:
    return result.paths[0, : int(result.lengths[0])].tolist()


def test_a_promotion_that_brings_one_token_may_cost_half_of_the_margin():
    tree = batch([[-1, 0]], [[0, 5]])
    assert path(walk(rows({1: 0, 5: -0.49 * CAP}, {2: 0}), tree, MARGIN)) == [1]
    assert path(walk(rows({1: 0, 5: -0.51 * CAP}, {2: 0}), tree, MARGIN)) == []


def test_one_that_brings_two_may_cost_all_of_it_and_never_more():
    tree = batch([[-1, 0, 1, 2]], [[0, 5, 6, 7]])
    for loss, expected in ((0.99 * CAP, [1, 2, 3]), (1.01 * CAP, [])):
        assert path(walk(rows({1: 0, 5: -loss}, {6: 0}, {7: 0}, {2: 0}), tree, MARGIN)) == expected


def test_a_match_is_passed_over_for_a_longer_path():
    # 5 is the choice and a leaf, 6 leads on to 7 and 8
    tree = batch([[-1, 0, 0, 2, 3]], [[0, 5, 6, 7, 8]])
    logits = rows({5: 0, 6: -0.5}, {1: 0}, {7: 0}, {8: 0}, {2: 0})
    result = walk(logits, tree, MARGIN)
    assert path(result) == [2, 3, 4]
    assert result.promotions.tolist() == [1]
    assert result.regrets.tolist() == [0.5]
    # Not for one as long, nor where promotions are limited.
    assert path(walk(rows({5: 0, 6: -0.5}, {1: 0}, {4: 0}, {8: 0}, {2: 0}), tree, MARGIN)) == [1]
    for limited in (RequestMargin(CAP, 1, lookahead=True), RequestMargin(CAP, None, 9.0, lookahead=True)):
        assert path(walk(logits, tree, limited)) == [1]


def test_protected_tokens_are_neither_promoted_nor_passed_over():
    tree = batch([[-1, 0, 0, 2, 3]], [[0, 5, 6, 7, 8]])
    margin = RequestMargin(CAP, protected=(EOS, 5), lookahead=True)
    assert path(walk(rows({5: 0, 6: -0.5}, {1: 0}, {7: 0}, {8: 0}, {2: 0}), tree, margin)) == [1]
    single = batch([[-1, 0]], [[0, EOS]])
    assert path(walk(rows({1: 0, EOS: -0.1}, {2: 0}), single, margin)) == []


def test_requests_of_a_batch_do_not_mind_each_other():
    two = batch([[-1, 0], [-1, 0]], [[0, 5], [0, 5]])
    logits = rows({1: 0, 5: -0.6 * CAP}, {2: 0}, {1: 0, 5: -0.6 * CAP}, {2: 0})
    assert walk(logits, two, MARGIN, RequestMargin(CAP)).lengths.tolist() == [0, 1]
    assert walk(logits, two, None, MARGIN).lengths.tolist() == [0, 0]


@pytest.mark.parametrize("kappa", [0.5, 0.2, 0.02])
def test_no_path_is_worth_more(kappa):
    """Of all paths from the root whose promotions are within the margin, the one taken is worth the most."""
    cap = math.log(1 / kappa)
    promotions = 0
    for seed in range(40):
        trees, logits = random_batch(seed, 3)
        result = walk(logits, trees, *[RequestMargin(cap, lookahead=True)] * 3)
        for b, (first, last) in enumerate(pairwise(trees.start.tolist())):
            parents, tokens = trees.parents[first:last].tolist(), trees.tokens[first:last].tolist()
            best = most_worth(logits[first:last].tolist(), parents, tokens, cap)
            worth = int(result.lengths[b]) - 2 * float(result.regrets[b]) / cap
            assert worth == pytest.approx(best, abs=1e-4)
            promotions += int(result.promotions[b])
    assert promotions > 10
