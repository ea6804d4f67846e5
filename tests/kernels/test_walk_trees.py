"""walk_trees: the rule's decisions one by one, equality with the reference, the arg-max of vLLM."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import reference
from adaptivespec_vllm.types import TreeBatch, VerifyResult

from .cases import VOCAB, assert_equal, batch, limits, random_batch, random_limits

needs_native = pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")
IMPLEMENTATIONS = [pytest.param(ops.walk_trees, id="native", marks=needs_native), reference.walk_trees]


def logit_rows(*rows: dict[int, float]) -> torch.Tensor:
    """One row of logits a tree row: the named ones, -20 elsewhere."""
    logits = torch.full((len(rows), VOCAB), -20.0)
    for row, values in enumerate(rows):
        for token, value in values.items():
            logits[row, token] = value
    return logits


# Tree of most decision tests: root -> {1: token 5, 2: token 6}; 1 -> {3: token 7}; 2 -> {4: token 8}.
TREE = ([[-1, 0, 0, 1, 2]], [[0, 5, 6, 7, 8]])


@pytest.mark.parametrize("walk", IMPLEMENTATIONS)
class TestDecisions:
    def test_the_choice_wins_over_the_margin(self, walk):
        logits = logit_rows({6: 3.0, 5: 2.9}, {}, {9: 1.0, 8: 0.5}, {}, {1: 0.0})
        result = walk(logits, batch(*TREE), limits())
        assert result.paths.tolist() == [[2, 4]]
        assert result.promotions.tolist() == [1]
        assert result.next_tokens.tolist() == [1]
        assert result.regrets.tolist() == [0.5]

    def test_strict_stops_at_a_mismatch(self, walk):
        logits = logit_rows({6: 3.0}, {}, {9: 1.0, 8: 0.999}, {}, {})
        result = walk(logits, batch(*TREE))
        assert result.paths.tolist() == [[2, -1]]
        assert (result.lengths.tolist(), result.next_tokens.tolist()) == ([1], [9])
        assert (result.promotions.tolist(), result.regrets.tolist()) == ([0], [0.0])

    def test_the_root_alone_gives_the_choice(self, walk):
        result = walk(logit_rows({9: 1.0}), batch([[-1]], [[3]]), limits())
        assert result.paths.shape == (1, 0)
        assert (result.lengths.tolist(), result.next_tokens.tolist()) == ([0], [9])

    def test_the_margin_is_met_at_its_edge_and_not_past_it(self, walk):
        edge = limits()
        edge.max_log_ratio[0] = 1.5
        for gap, length in ((1.5, 1), (1.5000001, 0)):
            logits = logit_rows({9: 0.0, 5: -gap}, {1: 0.0}, {}, {}, {})
            assert walk(logits, batch(*TREE), edge).lengths.tolist() == [length]

    def test_the_likelier_child_is_promoted(self, walk):
        logits = logit_rows({9: 1.0, 5: 0.2, 6: 0.4}, {}, {1: 0.0}, {}, {})
        assert walk(logits, batch(*TREE), limits()).paths.tolist() == [[2, -1]]

    def test_equally_likely_children_the_earlier_is_promoted(self, walk):
        logits = logit_rows({9: 1.0, 5: 0.4, 6: 0.4}, {1: 0.0}, {1: 0.0}, {}, {})
        assert walk(logits, batch(*TREE), limits()).paths.tolist() == [[1, -1]]

    def test_the_first_of_two_children_with_the_choice(self, walk):
        tree = batch([[-1, 0, 0, 0]], [[0, 4, 9, 9]])
        assert walk(logit_rows({9: 1.0}, {}, {1: 0.0}, {}), tree).paths.tolist() == [[2]]

    def test_a_masked_child_never_passes(self, walk):
        logits = logit_rows({9: 1.0, 5: -math.inf, 6: -math.inf}, {}, {}, {}, {})
        assert walk(logits, batch(*TREE), limits(kappa=0)).lengths.tolist() == [0]

    def test_a_protected_token_is_not_promoted_to(self, walk):
        logits = logit_rows({9: 1.0, 5: 0.9, 6: 0.8}, {1: 0.0}, {1: 0.0}, {}, {})
        assert walk(logits, batch(*TREE), limits(protected=(5,))).paths.tolist() == [[2, -1]]
        assert walk(logits, batch(*TREE), limits(protected=(5, 6))).lengths.tolist() == [0]

    def test_a_protected_token_is_not_promoted_away_from(self, walk):
        logits = logit_rows({9: 1.0, 5: 0.9}, {1: 0.0}, {}, {}, {})
        assert walk(logits, batch(*TREE), limits(protected=(9,))).lengths.tolist() == [0]

    def test_a_protected_choice_is_still_matched(self, walk):
        logits = logit_rows({5: 1.0}, {1: 0.0}, {}, {}, {})
        assert walk(logits, batch(*TREE), limits(protected=(5,))).lengths.tolist() == [1]

    def test_promotions_are_counted(self, walk):
        logits = logit_rows({9: 1.0, 5: 0.5}, {9: 1.0, 7: 0.75}, {}, {9: 0.0}, {})
        for allowed, length in ((-1, 2), (2, 2), (1, 1), (0, 0)):
            result = walk(logits, batch(*TREE), limits(max_promotions=allowed))
            assert result.lengths.tolist() == result.promotions.tolist() == [length]

    def test_regret_adds_up(self, walk):
        logits = logit_rows({9: 1.0, 5: 0.5}, {9: 1.0, 7: 0.75}, {}, {9: 0.0}, {})
        for allowed, length, regret in ((0.75, 2, 0.75), (0.7, 1, 0.5), (0.4, 0, 0.0)):
            result = walk(logits, batch(*TREE), limits(max_regret=allowed))
            assert (result.lengths.tolist(), result.regrets.tolist()) == ([length], [regret])

    def test_sampled_is_the_choice(self, walk):
        logits = logit_rows({9: 1.0, 5: 0.5, 6: 0.75}, {}, {9: 0.0}, {}, {})
        sampled = torch.tensor([5, 30, 31, 32, 33])
        result = walk(logits, batch(*TREE), sampled=sampled)
        assert (result.paths.tolist(), result.next_tokens.tolist()) == ([[1, -1]], [30])
        # The margin is still taken against the row's maximum.
        sampled = torch.tensor([2, 30, 31, 32, 33])
        result = walk(logits, batch(*TREE), limits(), sampled=sampled)
        assert (result.paths.tolist(), result.next_tokens.tolist()) == ([[2, -1]], [31])
        assert result.regrets.tolist() == [0.25]

    def test_max_depth_ends_the_walk(self, walk):
        logits = logit_rows({5: 1.0}, {7: 1.0}, {}, {1: 0.0}, {})
        result = walk(logits, batch(*TREE), max_depth=1)
        assert (result.paths.tolist(), result.next_tokens.tolist()) == ([[1]], [7])
        assert walk(logits, batch(*TREE), max_depth=4).paths.tolist() == [[1, 3, -1, -1]]

    def test_tokens_outside_the_vocabulary_never_pass(self, walk):
        tree = batch([[-1, 0, 0]], [[0, VOCAB, -7]])
        assert walk(logit_rows({9: 1.0}, {}, {}), tree, limits(kappa=0)).lengths.tolist() == [0]

    def test_rows_that_are_not_visited_are_not_read(self, walk):
        logits = logit_rows({6: 3.0}, {}, {9: 1.0}, {}, {})
        logits[[1, 3, 4]] = math.nan
        result = walk(logits, batch(*TREE), limits())
        assert (result.paths.tolist(), result.next_tokens.tolist()) == ([[2, -1]], [9])

    def test_nan_is_the_maximum_and_nothing_is_promoted_there(self, walk):
        logits = logit_rows({9: 1.0, 5: 0.9, 30: math.nan, 31: math.nan}, {}, {}, {}, {})
        result = walk(logits, batch(*TREE), limits(kappa=0))
        assert (result.lengths.tolist(), result.next_tokens.tolist()) == ([0], [30])


@needs_native
@pytest.mark.parametrize("requests", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_reference(requests, dtype):
    promoted = accepted = 0
    for seed in range(6):
        tree, logits = random_batch(seed * 10 + requests, requests)
        logits = logits.to(dtype)
        rng = torch.Generator().manual_seed(seed)
        sampled = torch.randint(0, VOCAB, tree.tokens.shape, generator=rng)
        for rule in (None, random_limits(seed, requests), limits(requests)):
            for choice in (None, sampled):
                got = ops.walk_trees(logits, tree, rule, choice)
                assert_equal(got, reference.walk_trees(logits, tree, rule, choice))
                promoted += int(got.promotions.sum())
                accepted += int(got.lengths.sum())
    assert accepted > promoted > 0  # the cases exercise both


@needs_native
@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 10**6), requests=st.integers(1, 5), vocab=st.integers(1, 80))
def test_equals_the_reference_on_any_tree(seed, requests, vocab):
    tree, logits = random_batch(seed, requests, vocab)
    rule = random_limits(seed, requests)
    assert_equal(ops.walk_trees(logits, tree, rule), reference.walk_trees(logits, tree, rule))


@needs_native
@pytest.mark.parametrize("seed", range(4))
def test_kappa_one_is_strict(seed):
    tree, logits = random_batch(seed, 6)
    logits = logits + torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) * 0.1  # no ties
    assert_equal(ops.walk_trees(logits, tree, limits(6, kappa=1)), ops.walk_trees(logits, tree))


@needs_native
@pytest.mark.parametrize("seed", range(4))
def test_kappa_zero_accepts_every_draft_of_a_chain(seed):
    tree, logits = random_batch(seed, 5, chain=True)
    result = ops.walk_trees(logits, tree, limits(5, kappa=0))
    assert result.lengths.tolist() == (tree.start.diff() - 1).tolist()


@needs_native
def test_a_cut_tree_gives_the_prefix_of_the_walk():
    tree, logits = random_batch(3, 1)
    whole = ops.walk_trees(logits, tree, limits(1, kappa=0))
    path = whole.paths[0, : whole.lengths[0]].tolist()
    assert len(path) > 1
    rows = path[-1]  # cut off the last accepted node and all after it
    cut = batch([tree.parents[:rows].tolist()], [tree.tokens[:rows].tolist()])
    got = ops.walk_trees(logits, cut, limits(1, kappa=0))
    kept = got.paths[0, : got.lengths[0]].tolist()
    assert kept[: len(path) - 1] == path[:-1]


def argmax_rows(seed: int) -> torch.Tensor:
    """Rows with many ties, infinities and NaN, of an odd length."""
    rng = torch.Generator().manual_seed(seed)
    vocab = int(torch.randint(1, 9000, (), generator=rng))
    rows = torch.randint(-3, 3, (12, vocab), generator=rng).float()
    rows[1] = -torch.inf
    rows[2] = torch.nan
    rows[3, vocab // 2] = torch.nan
    rows[4, vocab // 3] = rows[4, -1] = torch.inf
    rows[5] = 0.0
    rows[5, ::2] = -0.0
    rows[6] = -torch.inf
    rows[6, vocab - 1] = torch.nan
    rows[7] = torch.finfo(torch.float32).min
    rows[8, : vocab - 1] = -torch.inf
    return rows


def native_argmax(rows: torch.Tensor) -> torch.Tensor:
    return ops.walk_trees(rows, batch([[-1]] * len(rows))).next_tokens


@needs_native
@pytest.mark.parametrize("seed", range(20))
def test_the_argmax_is_that_of_vllm(seed):
    pytest.importorskip("vllm")
    import vllm._custom_ops  # noqa: F401  (loads vLLM's ops)

    rows = argmax_rows(seed)
    assert torch.equal(native_argmax(rows), torch.ops._C.greedy_argmax(rows))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(5))
def test_the_argmax_is_that_of_torch(seed, dtype):
    rows = argmax_rows(seed).to(dtype)
    assert torch.equal(native_argmax(rows), rows.argmax(-1))


@needs_native
def test_a_lone_long_row_is_shared_by_the_threads():
    vocab = 400_001
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for places in ([0], [vocab - 1], [133_333, 133_334, 300_000], [133_332, 399_999]):
            for value in (5.0, torch.nan):
                row = torch.zeros(1, vocab)
                row[0, places] = value
                assert native_argmax(row).tolist() == [places[0]]
        row = torch.zeros(1, vocab)
        row[0, 10], row[0, 300_000] = torch.inf, torch.nan
        assert native_argmax(row).tolist() == [300_000]
    finally:
        torch.set_num_threads(threads)


@needs_native
def test_strided_rows():
    tree, logits = random_batch(1, 4)
    wide = torch.full((logits.shape[0], VOCAB + 9), 50.0)
    wide[:, 4 : VOCAB + 4] = logits
    assert_equal(ops.walk_trees(wide[:, 4 : VOCAB + 4], tree, limits(4)), ops.walk_trees(logits, tree, limits(4)))


@needs_native
def test_outputs_are_written_in_full():
    tree, logits = random_batch(2, 3)
    depth = int(tree.depths.max())
    out = (
        torch.full((3, depth), 777, dtype=torch.int32),
        torch.full((3,), 777, dtype=torch.int32),
        torch.full((3,), 777),
        torch.full((3,), 777, dtype=torch.int32),
        torch.full((3,), math.nan),
    )
    torch.ops.adaptivespec.walk_trees(logits, tree.start, tree.parents, tree.tokens, None, None, None, None, None, *out)
    assert_equal(VerifyResult(*out), reference.walk_trees(logits, tree))


@needs_native
@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("logits must be contiguous in its last", lambda a: {"logits": a["logits"].t().contiguous().t()}),
        ("logits must be float32", lambda a: {"logits": a["logits"].double()}),
        ("logits must have a row for each", lambda a: {"logits": a["logits"][:-1]}),
        ("sampled must be int64", lambda a: {"sampled": torch.zeros(5, dtype=torch.int32)}),
        ("sampled must have size 5", lambda a: {"sampled": torch.zeros(4, dtype=torch.int64)}),
        ("start must be contiguous", lambda a: {"start": torch.zeros(1, dtype=torch.int32).expand(2)}),
        ("past the 5 rows", lambda a: {"start": torch.tensor([0, 6], dtype=torch.int32)}),
        ("has no root", lambda a: {"start": torch.tensor([5, 5], dtype=torch.int32)}),
        ("tokens must have size 5", lambda a: {"tokens": a["tokens"][:3]}),
        ("max_log_ratio must have size 1", lambda a: {"limits": limits(2)}),
    ],
)
def test_bad_arguments_are_refused(message, change):
    tree = batch(*TREE)
    arguments = {"logits": logit_rows({}, {}, {}, {}, {}), "start": tree.start, "tokens": tree.tokens,
                 "sampled": None, "limits": None}  # fmt: skip
    arguments.update(change(arguments))
    changed = TreeBatch(
        arguments["start"], arguments["tokens"], tree.parents, tree.depths, tree.positions, tree.ancestors
    )
    with pytest.raises(RuntimeError, match=message):
        ops.walk_trees(arguments["logits"], changed, arguments["limits"], arguments["sampled"])
