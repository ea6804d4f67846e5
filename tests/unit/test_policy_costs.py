"""Cost tables: between and beyond their points, smoothing, files and what can be wrong with them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec_vllm.config import ConfigError, resolve
from adaptivespec_vllm.policy import make_policy
from adaptivespec_vllm.policy.costs import UNMEASURED, Costs, CostTable, isotonic

seconds = st.floats(1e-6, 1e3)
points = st.lists(st.tuples(st.integers(1, 500), seconds), min_size=1, max_size=12, unique_by=lambda p: p[0]).map(
    sorted
)


class TestTable:
    def test_between_below_and_beyond_the_points(self):
        table = CostTable([(2, 1.0), (4, 3.0), (8, 4.0)])
        assert [table(rows) for rows in (1, 2, 3, 4, 6, 8, 12)] == pytest.approx([1, 1, 2, 3, 3.5, 4, 5])

    def test_vectors_are_the_same_element_by_element(self):
        table = CostTable([(1, 1.0), (4, 2.0)])
        assert table(np.arange(10)).tolist() == [table(rows) for rows in range(10)]
        assert isinstance(table(3), float)

    def test_one_point_costs_the_same_for_any_rows(self):
        assert CostTable([(8, 2.0)])(np.array([1, 8, 99])).tolist() == [2.0] * 3

    def test_noise_is_smoothed_by_the_least_change(self):
        table = CostTable([(1, 1.0), (2, 3.0), (3, 2.0), (4, 4.0)])
        assert table.points == ((1, 1.0), (2, 2.5), (3, 2.5), (4, 4.0))

    @given(points)
    def test_more_rows_never_cost_less(self, measured):
        times = CostTable(measured)(np.arange(1, 600))
        assert (np.diff(times) >= -1e-9 * times[1:]).all()
        assert (times > 0).all()

    @given(st.lists(st.integers(-50, 50), max_size=8))
    def test_isotonic_is_nearest_in_squares(self, values):
        optimize = pytest.importorskip("scipy.optimize")
        expected = optimize.isotonic_regression(values).x if values else []
        assert isotonic(values) == pytest.approx(list(expected))


GOOD = UNMEASURED.to_dict()

FAULTS = [
    ({"target": None}, ["target: got null", "rows, seconds"]),
    ({"target": []}, ["target: got []"]),
    ({"target": "fast"}, ['target: got "fast"']),
    ({"target": [[1, 0.1], [1, 0.2]]}, ["target[1]: got [1, 0.2]", "ascending"]),
    ({"level": [[4, 0.1], [2, 0.2]]}, ["level[1]"]),
    ({"level": [[0, 0.1]]}, ["level[0]: got [0, 0.1]", "from 1"]),
    ({"first": [[1, 0.0]]}, ["first[0]", "above 0"]),
    ({"first": [[1, -2]]}, ["first[0]"]),
    ({"first": [[1, float("nan")]]}, ["first[0]"]),
    ({"first": [[1, float("inf")]]}, ["first[0]"]),
    ({"first": [[1, "2"]]}, ["first[0]"]),
    ({"first": [[1, True]]}, ["first[0]"]),
    ({"first": [[1, 2, 3]]}, ["first[0]"]),
    ({"first": [1, 2]}, ["first[0]: got 1"]),
    ({"overhead": -1}, ["overhead: got -1", "at least 0"]),
    ({"overhead": None}, ["overhead: got null"]),
    ({"levle": []}, ["levle: unknown key", "'level'"]),
]


class TestFiles:
    def test_a_file_and_back(self, tmp_path):
        costs = Costs(CostTable([(1, 0.5), (9, 0.75)]), CostTable([(1, 0.1)]), CostTable([(2, 0.1)]), 0.25)
        (tmp_path / "costs.json").write_text(json.dumps(costs.to_dict()))
        assert Costs.read(tmp_path / "costs.json") == costs
        assert make_policy(resolve({"tree": {"costs": str(tmp_path / "costs.json")}})).costs == costs
        assert hash(Costs.from_dict(costs.to_dict())) == hash(costs)

    def test_costs_that_are_given_win_over_the_file(self):
        assert make_policy(resolve({"tree": {"costs": "no-such.json"}}), UNMEASURED).costs is UNMEASURED

    def test_overhead_is_optional(self):
        assert Costs.from_dict({key: value for key, value in GOOD.items() if key != "overhead"}).overhead == 0.0

    @pytest.mark.parametrize("table", ["target", "first", "level"])
    def test_every_table_is_required(self, table):
        with pytest.raises(ConfigError, match=f"{table}: missing; allowed: a list"):
            Costs.from_dict({key: value for key, value in GOOD.items() if key != table})

    @pytest.mark.parametrize(("change", "parts"), FAULTS, ids=[str(change) for change, _ in FAULTS])
    def test_every_fault_is_one_line_with_the_key(self, change, parts):
        with pytest.raises(ConfigError) as error:
            Costs.from_dict(GOOD | change)
        assert [part for part in parts if part not in str(error.value)] == []
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("text", "part"), [("{", "invalid JSON"), ("[]", "a JSON object"), ('{"target": 1}', "target: got 1")]
    )
    def test_a_fault_in_a_file_names_the_file(self, tmp_path, text, part):
        path = tmp_path / "costs.json"
        path.write_text(text)
        for look in (lambda: Costs.read(path), lambda: make_policy(resolve({"tree": {"costs": str(path)}}))):
            with pytest.raises(ConfigError, match=r"costs\.json: ") as error:
                look()
            assert part in str(error.value)

    def test_no_such_file(self):
        with pytest.raises(ConfigError, match="no such file"):
            make_policy(resolve({"tree": {"costs": "/no/such.json"}}))

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rows", "x"]), inner),
            max_leaves=6,
        ),
        st.sampled_from(["target", "overhead"]),
    )
    def test_no_value_gives_anything_but_costs_or_our_error(self, value, key):
        try:
            Costs.from_dict(GOOD | {key: value})
        except ConfigError as error:
            assert "\n" not in str(error)


class TestCorrected:
    COSTS = Costs(
        target=CostTable([(1, 10.0), (6, 10.5), (12, 12.0)]), first=CostTable([(1, 1.0)]), level=CostTable([(1, 0.5)])
    )

    def test_plain_steps_tell_of_overhead_by_requests(self) -> None:
        corrected = self.COSTS.corrected([(1, 2.0), (4, 5.0)], [])
        assert (corrected.overhead, corrected.target) == (2.0, self.COSTS.target)
        assert corrected.of_requests(1)(1) == pytest.approx(10.0 + 2.0)
        assert corrected.of_requests(2)(2) == pytest.approx(10.1 + 3.0)
        assert corrected.of_requests(9)(9) == pytest.approx(11.25 + 5.0)

    def test_what_verifying_takes_besides_counts_from_the_first_draft_on(self) -> None:
        corrected = self.COSTS.corrected([(2, 1.0)], [(6, 3.0), (8, 4.0)])
        step = corrected.of_requests(2)
        known = {2: 10.1 + 1.0, 3: 10.2 + 1.0 + 3.0, 6: 10.5 + 1.0 + 3.0, 7: 10.75 + 1.0 + 3.5, 12: 12.0 + 1.0 + 4.0}
        assert {rows: step(rows) for rows in known} == pytest.approx(known)

    def test_beyond_all_that_was_seen_it_goes_on_as_the_target(self) -> None:
        step = self.COSTS.corrected([(20, 1.0)], [(24, 3.0)]).of_requests(20)
        assert step(60) - step(50) == pytest.approx(self.COSTS.target(60) - self.COSTS.target(50))

    def test_more_rows_never_cost_less(self) -> None:
        step = self.COSTS.corrected([(1, 5.0)], [(3, 4.0), (6, -20.0)]).of_requests(1)
        seconds = [step(rows) for rows in range(1, 20)]
        assert seconds == sorted(seconds) and seconds[0] == 15.0

    def test_less_than_nothing_is_nothing(self) -> None:
        assert self.COSTS.corrected([(1, -3.0)], []).of_requests(1)(1) == 10.0

    def test_there_and_back(self) -> None:
        corrected = self.COSTS.corrected([(1, 2.0), (4, 5.0)], [(6, 3.0)])
        assert Costs.from_dict(json.loads(json.dumps(corrected.to_dict()))) == corrected
