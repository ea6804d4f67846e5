"""The recording that is shipped, coarsely: it is remade with every head, and its figures change."""

from __future__ import annotations

import pytest

from adaptivespec_vllm.bench.arms import parse
from adaptivespec_vllm.bench.result import ALL_KINDS
from adaptivespec_vllm.simulate.cli import DEFAULT_RECORDING
from adaptivespec_vllm.simulate.figures import simulate
from adaptivespec_vllm.simulate.recording import Recording
from adaptivespec_vllm.simulate.search import Search
from adaptivespec_vllm.simulate.tables import SHIPPED, costs_of


@pytest.fixture(scope="module")
def shipped() -> Recording:
    return Recording.read(DEFAULT_RECORDING)


@pytest.fixture(scope="module")
def search(shipped: Recording) -> Search:
    return Search(shipped)


def test_it_is_small_and_complete(shipped: Recording) -> None:
    assert DEFAULT_RECORDING.stat().st_size < 2_000_000
    assert shipped.kinds == ["math", "code", "chat"]
    assert sum(text.tokens for text in shipped.texts) > 1000
    for text in shipped.texts:
        for position in text.positions:
            assert (position.log_probs[:, 1:] <= position.log_probs[:, :-1]).all()
            assert sorted(position.nodes[position.nodes >= 0].tolist()) == list(range(1, len(position.taken)))


@pytest.mark.parametrize("costs", sorted(SHIPPED))
def test_the_policy_beats_every_chain_and_keeps_up_with_every_static_tree(
    shipped: Recording, search: Search, costs: str
) -> None:
    """Under both tables, one request at a time, of each kind and over all."""
    arm = "default:10,6,60"
    result = simulate(shipped, costs_of(costs), 1, parse(arm, "HEAD"), search)
    for kind, own in result.arms[arm].items():
        assert own.vs_plain > result.best_chain[kind].vs_plain
        assert own.vs_plain > 0.95 * result.best_tree[kind].vs_plain
    assert result.arms[arm][ALL_KINDS].vs_plain > 0.95 * result.best_of_each[ALL_KINDS]
    # Hardly any node of its trees is unknown, so the answer is the recording's.
    assert result.arms[arm][ALL_KINDS].unrecorded < 0.05 * sum(text.tokens for text in shipped.texts)


@pytest.mark.parametrize("batch", [8, 32])
def test_a_load_that_leaves_no_room_costs_next_to_nothing(shipped: Recording, search: Search, batch: int) -> None:
    result = simulate(shipped, costs_of("cpu-2core"), batch, parse("default", "HEAD"), search)
    own = result.arms["default"][ALL_KINDS].vs_plain
    assert own > 0.9
    assert own > 0.98 * result.best_tree[ALL_KINDS].vs_plain
