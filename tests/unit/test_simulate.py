"""Recorded texts in virtual time: hand-made recordings with known answers, and the search against the expansion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from adaptivespec_vllm.bench.arms import parse
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.result import ALL_KINDS
from adaptivespec_vllm.config import MAX_EXPANDED_NODES, resolve
from adaptivespec_vllm.draft import LevelRows
from adaptivespec_vllm.policy import make_policy
from adaptivespec_vllm.policy.base import TreePolicy
from adaptivespec_vllm.policy.costs import Costs, CostTable
from adaptivespec_vllm.simulate.figures import choices, policy_maker, simulate, swept
from adaptivespec_vllm.simulate.recording import Recording
from adaptivespec_vllm.simulate.replay import RecordedHead, accepted_path, groups, replay
from adaptivespec_vllm.simulate.search import Search, shapes
from adaptivespec_vllm.simulate.tables import SHIPPED, costs_of, with_head, with_rows
from adaptivespec_vllm.types import DraftTree, TreeShape
from tests.unit.recordings import USUAL, position, random_recording, recording

COSTS = Costs(
    target=CostTable([(1, 10.0), (9, 14.0)]),  # and half a second a row beyond
    first=CostTable([(1, 2.0), (5, 3.0)]),
    level=CostTable([(1, 1.0), (4, 1.6)]),
    overhead=0.25,
)


def static(*shape: int) -> TreePolicy:
    named = dict(zip(("depth", "width", "nodes"), shape, strict=True))
    return make_policy(resolve({"tree": {"policy": "static", "shape": named}}))


@pytest.fixture
def one_text(tmp_path: Path) -> Recording:
    """Six tokens: of the first step's tree two are accepted, of the second's none, of the third's two."""
    return recording(
        tmp_path / "one.npz",
        {
            "math/0": [
                position([0, 1]),  # t0: t1 is the best child, t2 the second best of its children
                position([0, 0, 0]),  # never a root here
                position([5, 5]),
                position([], levels=1),
                position([1, 0]),
                position([0]),
            ]
        },
    )


class TestRecording:
    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        again = recording(tmp_path / "r.npz", {"math/0": [position([1, 2])], "chat/0": [position([0])] * 2})
        assert (again.kinds, again.about) == (["math", "chat"], {"target": "by hand", "head": "by hand"})
        assert [text.tokens for text in again.texts] == [1, 2]
        first = again.texts[0].positions[0]
        assert first.log_probs[0] == pytest.approx(USUAL, abs=2e-3)
        assert (first.nodes[0] == np.arange(1, 9)).all()
        assert first.taken[0] == 1 and first.taken[first.nodes[0, 1]] == 2
        assert np.count_nonzero(first.taken >= 0) == 2
        assert first.nodes[first.nodes[0, 3], 0] > 0 and (first.nodes[-1] == -1).all()

    def test_only_some_kinds(self, tmp_path: Path) -> None:
        texts = {"math/0": [position([1])], "chat/0": [position([0])]}
        assert recording(tmp_path / "r.npz", texts).only(["chat"]).kinds == ["chat"]
        with pytest.raises(BadInput, match=r'--kinds: got "poems"; allowed: .*math, chat'):
            recording(tmp_path / "r.npz", texts).only(["chat", "poems"])

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"text", None])
    def test_files_that_are_none(self, tmp_path: Path, content: bytes | None) -> None:
        path = tmp_path / "bad.npz"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(BadInput, match=r"^--recording: got .*allowed: a file that scripts/record_steps.py wrote"):
            Recording.read(path)

    def test_an_archive_of_something_else(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "other.npz", about="{}", x=np.zeros(3))
        with pytest.raises(BadInput, match="one of another version"):
            Recording.read(tmp_path / "other.npz")


class TestHead:
    def rows(self, tokens: list[int], parent_rows: list[int]) -> LevelRows:
        start = torch.tensor([0, len(tokens)], dtype=torch.int32)
        none = torch.zeros(0)
        return LevelRows(torch.tensor(tokens), torch.tensor(parent_rows), none, start, none, none)

    def test_it_answers_what_was_recorded_and_counts_what_was_not(self, tmp_path: Path) -> None:
        random = np.random.default_rng(3)
        own = recording(tmp_path / "r.npz", {"a/0": [position([0], levels=2, width=3, random=random)]})
        at = own.texts[0].positions[0]
        head = RecordedHead([at])
        values, ranks = head.first(4)
        assert values.tolist() == [at.log_probs[0, :4].tolist()] and ranks.tolist() == [[0, 1, 2, 3]]
        values, _ = head.children(self.rows([2, 0], [0, 0]), 3)
        assert values.tolist() == at.log_probs[[3, 1], :3].tolist()
        assert head.unrecorded == 0
        values, _ = head.children(self.rows([1], [1]), 2)  # below the recorded levels
        assert (values < -10).all()
        assert (head.unrecorded, head.levels) == (1, [2, 1])

    def test_accepted_is_the_longest_beginning_of_the_text_in_the_tree(self, tmp_path: Path) -> None:
        at = recording(tmp_path / "r.npz", {"a/0": [position([1, 0, 2])]}).texts[0].positions[0]
        # rows: 1 = child 0, 2 = child 1, 3 = child 1's child 0, 4 = child 0's child 0, 5 = its child 1
        tree = DraftTree([0, 1, 0, 0, 1], [0, 0, 2, 1, 3], 0)
        assert accepted_path(tree, at) == [2, 3]
        assert accepted_path(DraftTree([1, 0, 2], [0, 1, 2], 0), at) == [1, 2, 3]
        assert accepted_path(DraftTree([0], [0], 0), at) == []
        assert accepted_path(DraftTree([], [], 0), at) == []


class TestTime:
    def test_plain_decoding(self, one_text: Recording) -> None:
        ((kind, tally),) = replay(one_text, None, COSTS)
        assert (kind, tally.tokens, tally.steps, tally.nodes) == ("math", 6, 6, 0)
        assert tally.seconds == pytest.approx(6 * 10.25)

    def test_a_chain(self, one_text: Recording) -> None:
        """t0 accepts t1, t2 nothing, t3 nothing, t4 nothing (its second child), t5 its best one, beyond the text."""
        ((_, tally),) = replay(one_text, static(1, 1, 1), COSTS)
        assert (tally.tokens, tally.steps, tally.nodes) == (6, 5, 5)
        # The head's first pass runs over what the step before emitted.
        assert tally.seconds == pytest.approx(5 * (0.25 + 10.5) + 4 * 2.0 + 2.25)

    def test_a_tree_pays_for_its_levels(self, one_text: Recording) -> None:
        ((_, tally),) = replay(one_text, static(2, 2, 6), COSTS)
        # t0: t1 and t2 accepted; t3: nothing recorded below the root, its children are drafted in vain; t4: both.
        assert (tally.tokens, tally.steps, tally.nodes) == (6, 3, 18)
        assert tally.seconds == pytest.approx(3 * (0.25 + 13.0 + 1.2) + 2.0 + 2.5 + 2.0)
        assert tally.unrecorded == 2
        assert (tally.depth, tally.width) == (6, 12)

    def test_a_policy_that_knows_costs_models_the_time_that_passes(self, one_text: Recording) -> None:
        policy = make_policy(resolve({}), COSTS)
        tallies = [tally for _, tally in replay(one_text, policy, COSTS)]
        emitted = sum(tally.tokens for tally in tallies)
        assert emitted == 6
        assert policy.signals == {}  # every request was forgotten

    def test_only_probes_have_a_first_pass_where_drafting_never_pays(self, tmp_path: Path) -> None:
        dear = Costs(COSTS.target, CostTable([(1, 1e4), (2, 1e4 + 1)]), COSTS.level)
        text = {"a/0": [position([], levels=1)] * 192}
        ((_, tally),) = replay(recording(tmp_path / "r.npz", text), make_policy(resolve({}), dear), dear)
        assert tally.tokens == 192
        assert tally.first_passes <= 4


class TestBatches:
    def test_of_one_kinds_take_turns(self, tmp_path: Path) -> None:
        order = [group.slots[0][0].id for group in groups(random_recording(tmp_path / "r.npz"), 1)]
        assert order == ["a/0", "b/0", "a/1", "a/2"]

    def test_larger_ones_are_full_to_the_end(self, tmp_path: Path) -> None:
        own = random_recording(tmp_path / "r.npz")
        first, second = groups(own, 2)
        assert [[text.id for text in texts] for texts in first.slots] == [["a/0", "a/1", "a/2"], ["a/1", "a/2", "a/0"]]
        assert (first.tokens, second.tokens) == (9 + 7 + 4, 5 + 5)
        for _, tally in replay(own, None, COSTS, 2):
            assert tally.seconds == pytest.approx(tally.steps / 2 * (COSTS.overhead + COSTS.target(2)))
            assert tally.tokens == tally.steps

    def test_rows_of_all_requests_share_a_pass(self, one_text: Recording) -> None:
        (single,) = (tally for _, tally in replay(one_text, static(1, 1, 1), COSTS, 1))
        (double,) = (tally for _, tally in replay(one_text, static(1, 1, 1), COSTS, 2))
        assert (double.tokens, double.steps) == (2 * single.tokens, 2 * single.steps)
        assert double.seconds == pytest.approx(5 * (0.25 + 11.5) + 4 * 2.25 + 2.75)


class TestSearch:
    @pytest.mark.parametrize("batch", [1, 3])
    def test_every_shape_takes_the_time_that_the_expansion_takes(self, tmp_path: Path, batch: int) -> None:
        own = random_recording(tmp_path / "r.npz", seed=batch)
        tried = [
            TreeShape(*shape)
            for shape in [
                (1, 1, 1), (4, 1, 4), (1, 8, 8), (2, 3, 5), (2, 3, 12), (3, 4, 3), (3, 8, 63), (4, 2, 9), (4, 5, 40),
            ]
        ]  # fmt: skip
        found = Search(own, tried).run(COSTS, batch)
        for row, shape in enumerate(tried):
            tallies = [tally for _, tally in replay(own, static(*shape), COSTS, batch)]
            assert found.seconds[row] == pytest.approx([tally.seconds for tally in tallies])
            assert found.tokens[row].tolist() == [tally.tokens for tally in tallies]

    def test_the_best_are_the_best(self, tmp_path: Path) -> None:
        own = random_recording(tmp_path / "r.npz")
        tried = shapes(range(1, 4), range(1, 4))
        found = Search(own, tried).run(COSTS)
        speeds = found.tokens.sum(1) / found.seconds.sum(1)
        assert found.best() == (tried[int(speeds.argmax())], pytest.approx(speeds.max()))
        chain, speed = found.best("b", chains=True)
        assert chain.width == 1 and speed <= found.best("b")[1]
        assert found.best_of_each("b") == pytest.approx(found.best("b")[1])  # one text alone
        assert found.best_of_each() > found.best()[1]

    def test_the_grid_is_what_a_configuration_may_hold(self) -> None:
        every = shapes()
        assert len(set(every)) == len(every) > 500
        for shape in every[::7]:
            static(*shape)
        assert all(shape.width * (shape.depth - 1) <= MAX_EXPANDED_NODES for shape in every)
        assert sum(shape.width == 1 for shape in every) == 10


class TestCosts:
    def test_the_published_step_times_of_an_8b_target_on_an_a100(self) -> None:
        costs = costs_of("a100-8b")

        def step(depth: int, width: int, nodes: int) -> float:
            """Milliseconds of a step whose levels are all full."""
            head = costs.first(1) + (depth - 1) * costs.level(width)
            return 1000 * (costs.overhead + costs.target(1 + nodes) + head)

        assert 1000 * (costs.overhead + costs.target(1)) == pytest.approx(11.3)
        for depth in range(1, 11):
            assert step(depth, 1, depth) == pytest.approx(13.2 + 0.78 * depth, abs=0.01)
        assert step(7, 4, 7) - step(7, 1, 7) == pytest.approx(1.1, abs=0.01)
        assert step(10, 6, 59) == pytest.approx(25.5, abs=0.01)  # 60 rows with the root

    def test_dearer_rows_and_heads(self) -> None:
        dear = with_rows(COSTS, 3)
        assert (dear.target(1), dear.target(5), dear.first) == (10.0, 16.0, COSTS.first)
        assert with_rows(COSTS, 0).target(9) == 10.0
        dear = with_head(COSTS, 2)
        assert (dear.first(1), dear.level(4), dear.target) == (4.0, 3.2, COSTS.target)

    @pytest.mark.parametrize("name", [*SHIPPED, None])
    def test_shipped_tables_and_files(self, tmp_path: Path, name: str | None) -> None:
        (tmp_path / "mine.json").write_text('{"target": [[1, 1]], "first": [[1, 1]], "level": [[1, 1]]}')
        assert costs_of(name or str(tmp_path / "mine.json")).target(1) > 0

    def test_neither(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=r'^--costs: got "h100"; allowed: a100-8b, cpu-2core, or a file of costs \('):
            costs_of("h100")
        (tmp_path / "bad.json").write_text('{"target": [[1, -1]]}')
        with pytest.raises(BadInput, match=r"target\[0\]: got \[1, -1\]"):
            costs_of(str(tmp_path / "bad.json"))


class TestArms:
    def test_figures_of_arms(self, one_text: Recording) -> None:
        result = simulate(one_text, COSTS, 1, parse("plain stock:1 tree:2,2,6 default", "HEAD"), Search(one_text))
        assert list(result.arms) == ["plain", "stock:1", "tree:2,2,6", "default"]
        plain, tree = result.arms["plain"]["math"], result.arms["tree:2,2,6"]["math"]
        assert (plain.vs_plain, plain.accepted_length, plain.nodes) == (pytest.approx(1), 1, 0)
        assert (tree.accepted_length, tree.depth, tree.width, tree.nodes, tree.unrecorded) == (2, 2, 4, 6, 2)
        assert tree.vs_plain == pytest.approx(61.5 / 49.85)
        assert result.best_tree["math"].vs_plain >= tree.vs_plain
        assert result.best_chain["math"].shape[1] == 1
        assert ALL_KINDS not in result.best_tree

    def test_several_kinds_add_up(self, tmp_path: Path) -> None:
        own = random_recording(tmp_path / "r.npz")
        figures = simulate(own, COSTS, 1, parse("plain stock:2", "HEAD")).arms["stock:2"]
        assert list(figures) == ["a", "b", ALL_KINDS]
        a, b, both = (figures[kind].tokens_per_second for kind in figures)
        assert both == pytest.approx(25 / (20 / a + 5 / b))

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("default@0.2", "without the margin rule"),
            ("tree:3,9,20", "a width up to 8"),
            ("tree:11,1,11", "a depth up to 10"),
            ("stock:11", "chains of at most 10"),
        ],
    )
    def test_arms_that_cannot_be_replayed(self, name: str, said: str) -> None:
        with pytest.raises(BadInput, match=f'^--arms: got "{name}"; allowed: .*{said}'):
            policy_maker(parse(name, "HEAD")[1])

    def test_other_methods_cannot_be_replayed(self, tmp_path: Path) -> None:
        (tmp_path / "ngram.json").write_text('{"method": "ngram", "num_speculative_tokens": 4}')
        with pytest.raises(BadInput, match="methods 'adaptivespec', and 'eagle3'"):
            policy_maker(parse(f"config:{tmp_path}/ngram.json", "HEAD")[1])

    def test_the_last_arm_that_is_aware_of_costs_is_followed(self) -> None:
        followed = swept(parse("plain default stock:2 default:4,4,12 paper", "HEAD"))
        assert followed is not None and followed.name == "default:4,4,12"
        assert swept(parse("plain stock:2 paper tree:2,2,2", "HEAD")) is None

    def test_what_gets_dearer_is_drafted_less(self, tmp_path: Path) -> None:
        own = random_recording(tmp_path / "r.npz", levels=3)
        arm = parse("default:3,4,12", "HEAD")[1]
        panel = choices(own, COSTS, arm, Search(own), with_rows, (0.0, 1.0, 30.0))
        assert [choice.factor for choice in panel] == [0.0, 1.0, 30.0]
        assert panel[0].nodes > panel[1].nodes > panel[2].nodes
        assert all(choice.best_tree >= choice.best_chain for choice in panel)
