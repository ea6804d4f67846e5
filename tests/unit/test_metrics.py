"""The list of metrics, and what is held to it: documentation, dashboard, log line, sums of counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.engine.decision_log import VARIABLE, DecisionLog
from adaptivespec_vllm.engine.metrics.catalogue import METRICS, OVERHEAD, PREFIX, markdown_table
from adaptivespec_vllm.engine.v1.stats import CHAIN_REASONS, WorkerStats
from adaptivespec_vllm.types import DraftTree

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "examples" / "grafana" / "adaptivespec.json"
TREE = DraftTree([7, 8, 9, 5], [0, 0, 1, 3], root_position=11)  # that of types.py


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


class TestCatalogue:
    def test_names_are_those_that_prometheus_allows(self) -> None:
        names = [metric.full_name for metric in METRICS]
        assert len(set(names)) == len(names)
        assert all(re.fullmatch(r"vllm:adaptivespec_[a-z_]+", name) for name in names)

    def test_buckets_ascend_and_begin_above_zero(self) -> None:
        """Ray's histograms take no other."""
        for metric in METRICS:
            assert (metric.kind == "histogram") == bool(metric.buckets)
            assert list(metric.buckets) == sorted(set(metric.buckets)) and all(edge > 0 for edge in metric.buckets)

    def test_a_step_is_read_by_the_values_of_the_label(self) -> None:
        stats = WorkerStats(engine_steps=5, plain_engine_steps=2)
        for metric in METRICS:
            read = metric.read(stats)
            if metric.label:
                assert set(read) <= set(metric.values)
        read = {metric.name: metric.read(stats) for metric in METRICS}
        assert read["engine_steps"] == {"tree": 3, "plain": 2}
        assert set(read["overhead_seconds"]) == set(OVERHEAD)

    def test_every_reason_has_a_series(self) -> None:
        chains = next(metric for metric in METRICS if metric.name == "chain_fallbacks")
        assert chains.values == CHAIN_REASONS


class TestDocumentation:
    def test_has_the_table(self) -> None:
        text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
        assert markdown_table() in text, "run: python -m adaptivespec_vllm.engine.metrics"

    def test_names_no_other_metric(self) -> None:
        known = {name for metric in METRICS for name in (metric.full_name, *metric.shown)}
        text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
        assert {name for name in re.findall(r"vllm:[a-z_]+", text) if name.startswith(PREFIX)} <= known


class TestDashboard:
    def test_names_no_metric_that_we_do_not_have(self, dashboard: dict[str, Any]) -> None:
        known = {name for metric in METRICS for name in metric.shown}
        used = set(re.findall(r"vllm:[a-z_]+", " ".join(expressions(dashboard))))
        assert {name for name in used if name.startswith(PREFIX)} <= known

    def test_shows_every_metric_of_ours(self, dashboard: dict[str, Any]) -> None:
        text = " ".join(expressions(dashboard))
        assert [metric.full_name for metric in METRICS if not any(name in text for name in metric.shown)] == []

    def test_labels_are_those_of_the_metrics(self, dashboard: dict[str, Any]) -> None:
        ours = {metric.label for metric in METRICS} | {"le", "position", "model_name"}
        for expression in expressions(dashboard):
            assert set(re.findall(r"by \((\w+)\)", expression)) <= ours
            assert expression.count("(") == expression.count(")")

    def test_expressions_are_promql(self, dashboard: dict[str, Any]) -> None:
        parser = pytest.importorskip("promql_parser")
        text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
        documented = re.findall(r"`((?:rate|sum|1 -)[^`]+)`", text)
        assert len(documented) > 3
        for expression in (*expressions(dashboard), *documented):
            parser.parse(expression.replace("$__rate_interval", "5m"))
        with pytest.raises(ValueError):
            parser.parse("sum(rate(x[5m])")

    def test_panels_do_not_overlap(self, dashboard: dict[str, Any]) -> None:
        cells = [
            (x, y)
            for panel in dashboard["panels"]
            for place in [panel["gridPos"]]
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


class TestCounts:
    def test_a_step_with_a_tree(self) -> None:
        stats = WorkerStats()
        assert stats.record(TREE, accepted=2, promotions=1, regret=0.5) == 3
        assert (stats.steps, stats.emitted, stats.accepted, stats.promotions, stats.regret) == (1, 3, 2, 1, 0.5)
        assert (stats.drafted_nodes, stats.drafted_depth, stats.drafted_width) == (4, 3, 2)
        assert (stats.lengths, stats.nodes, stats.depths, stats.widths) == ({3: 1}, {4: 1}, {3: 1}, {2: 1})
        assert stats.accepted_at_depth == {1: 1, 2: 1}

    def test_a_step_without_one_is_no_tree_of_size_zero(self) -> None:
        stats = WorkerStats()
        assert stats.record(DraftTree([], [], 11), accepted=0, promotions=0, regret=0.0) == 0
        assert (stats.steps, stats.emitted, stats.lengths) == (1, 1, {1: 1})
        assert not stats.nodes and not stats.depths and not stats.widths

    def test_sums(self) -> None:
        one, other = WorkerStats(), WorkerStats()
        one.record(TREE, 2, 1, 0.5)
        other.record(TREE, 0, 0, 0.0)
        other.seconds["verify"] = 0.25
        one.add(other)
        assert (one.steps, one.emitted, one.drafted_nodes) == (2, 4, 8)
        assert one.nodes == {4: 2} and one.lengths == {3: 1, 1: 1} and one.seconds == {"verify": 0.25}

    def test_leave_and_arrive_unchanged(self) -> None:
        stats = WorkerStats()
        stats.record(TREE, 2, 1, 0.5)
        stats.chains["no_tree"] += 1
        assert WorkerStats.of(stats.as_dict()) == stats


def test_a_decision_log_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{VARIABLE}: {tmp_path} cannot be written \(Is a directory\)"):
        DecisionLog(tmp_path)
