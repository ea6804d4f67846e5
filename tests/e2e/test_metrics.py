"""Metrics of real engines in this process: true by the worker's own sums, and by vLLM's."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.engine.metrics.catalogue import METRICS, OVERHEAD, PREFIX
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, truth_of
from tests.e2e.oracle import Oracle, runner_of

Values = dict[str, Any]


@pytest.fixture(scope="module")
def counted(make_llm: Callable[..., Any], tiny_head: Path) -> Any:
    """An engine that is lossy, keeps statistics and records requests; its guard and its breaker trip easily."""
    return make_llm(
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config=adaptivespec(
            tiny_head,
            tree={"policy": "adaptive"},
            signal={"breaker_steps": 2},
            margin={"kappa": 0.01},
            guard={"max_regret": 5.0},
        ),
    )


def snapshot(llm: Any) -> Values:
    """Values of all metrics: numbers, or (count, sum) of a histogram; by name, and label where there is one."""
    values: Values = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix(PREFIX)
        label = [v for k, v in metric.labels.items() if k not in ("model_name", "engine")]
        key = f"{name}/{label[0]}" if label else name
        values[key] = (metric.count, metric.sum) if hasattr(metric, "count") else getattr(metric, "value", None)
    return values


def difference(after: Values, before: Values) -> Values:
    def minus(a: Any, b: Any) -> Any:
        return tuple(x - y for x, y in zip(a, b, strict=True)) if isinstance(a, tuple) else a - b

    return {name: minus(value, before[name]) for name, value in after.items() if value is not None}


@pytest.fixture(scope="module")
def decoded(counted: Any, plain: Any) -> tuple[Values, Values, list[Any]]:
    """What the metrics and the worker counted of some requests, and the requests' outputs."""
    prompts = random_prompts(6, seed=91)
    truth = truth_of(prompts, generate(plain, prompts, greedy(40)))
    counted.collective_rpc("adaptivespec_stats")
    drafts, before = Oracle(runner_of(counted), truth, max_nodes=7), snapshot(counted)
    try:
        generate(counted, prompts, greedy(40))
    finally:
        drafts.remove()
    # a margin drives the texts away from the truth, so the breaker and the guard trip here
    outputs = counted.generate(random_prompts(4, seed=92), greedy(40), use_tqdm=False)
    return difference(snapshot(counted), before), counted.collective_rpc("adaptivespec_stats")[0], outputs


def test_are_what_the_worker_counted(decoded: tuple[Values, Values, list[Any]]) -> None:
    metrics, stats, _ = decoded
    assert metrics["accepted_length"] == (stats["steps"], stats["emitted"])
    trees = sum(stats["nodes"].values())
    assert metrics["drafted_nodes"] == (trees, stats["drafted_nodes"])
    assert metrics["drafted_depth"] == (trees, stats["drafted_depth"])
    assert metrics["drafted_width"] == (trees, stats["drafted_width"])
    assert metrics["engine_steps/tree"] + metrics["engine_steps/plain"] == stats["engine_steps"]
    assert metrics["engine_steps/plain"] == stats["plain_engine_steps"] > 0
    assert metrics["promotions"] == stats["promotions"] > 0
    assert metrics["logprob_given_up_nats"] == pytest.approx(stats["regret"], abs=1.0)  # vLLM's reader gives integers
    assert metrics["guard_trips/max_regret"] == stats["guard_trips"]["max_regret"] > 0
    assert metrics["guard_trips/min_acceptance"] == 0
    assert metrics["breaker_trips"] == stats["breaker_trips"] > 0
    assert all(stats["seconds"][section] > 0 for section in OVERHEAD.values())


def test_agree_with_vllms_own(decoded: tuple[Values, Values, list[Any]]) -> None:
    metrics, stats, _ = decoded
    assert metrics["vllm:spec_decode_num_drafts"] == metrics["drafted_nodes"][0]
    assert metrics["vllm:spec_decode_num_draft_tokens"] == metrics["drafted_nodes"][1]
    assert metrics["vllm:spec_decode_num_accepted_tokens"] == stats["accepted"] > 0


def test_vllms_positions_are_depths(counted: Any, decoded: Any) -> None:
    before, (vector,) = counted.collective_rpc("adaptivespec_stats", args=(False,)), _per_position(counted)
    generate(counted, random_prompts(4, seed=93), greedy(30))
    reached = counted.collective_rpc("adaptivespec_stats")[0]["accepted_at_depth"]
    gained = [after - was for after, was in zip(_per_position(counted)[0], vector, strict=True)]
    base = before[0]["accepted_at_depth"]
    assert gained == [reached.get(depth, 0) - base.get(depth, 0) for depth in range(1, len(gained) + 1)]


def _per_position(llm: Any) -> list[list[int]]:
    return [metric.values for metric in llm.get_metrics() if hasattr(metric, "values")]


def test_a_request_has_its_own_record(decoded: tuple[Values, Values, list[Any]]) -> None:
    _, _, outputs = decoded
    records = [output.outputs[0].spec_decode_metrics.to_dict() for output in outputs]
    for output, record in zip(outputs, records, strict=True):
        assert 0 <= record["num_promoted_tokens"] <= record["num_accepted_draft_tokens"] <= record["num_draft_tokens"]
        assert (record["logprob_given_up"] > 0) == (record["num_promoted_tokens"] > 0)
        assert sum(record["per_step_drafted"]) == record["num_draft_tokens"]
        assert output.kv_transfer_params is None
    assert sum(record["num_promoted_tokens"] for record in records) > 0
    # a guard of 5 nats stops within one step of it
    assert all(record["logprob_given_up"] < 5.0 + 7 * 4.61 for record in records)


def test_the_log_has_a_line_an_interval(
    counted: Any, decoded: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(
        counted.llm_engine, "_last_log_time", math.inf, raising=False
    )  # no interval ends while decoding
    logger = next(
        one for one in counted.llm_engine.logger_manager.stat_loggers if type(one).__name__ == "TreeStatLogger"
    )
    monkeypatch.setattr(logger, "_interval", {0: type(runner_of(counted).totals)()})
    generate(counted, random_prompts(3, seed=94), greedy(20))
    stats = counted.collective_rpc("adaptivespec_stats")[0]
    with caplog.at_level(logging.INFO, "vllm.adaptivespec"):
        counted.llm_engine.do_log_stats()
        counted.llm_engine.do_log_stats()  # nothing happened since
    records = {(r.created, r.getMessage()) for r in caplog.records}  # a handler may be reached on two ways
    lines = [message for _, message in records if message.startswith("AdaptiveSpec metrics")]
    assert len(lines) == 1
    length = re.search(r"Mean accepted length: ([\d.]+)", lines[0])
    assert length is not None and length[1] == f"{stats['emitted'] / stats['steps']:.2f}"


def test_kinds_of_metrics_are_those_of_vllms_logger(counted: Any) -> None:
    """As with Ray, whose counters are not Prometheus's."""
    from prometheus_client import CollectorRegistry, Counter, Histogram
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    from adaptivespec_vllm.engine.metrics.stat_logger import TreeStatLogger

    made: list[str] = []

    class OtherCounter(Counter):
        def __init__(self, *args: Any, **settings: Any) -> None:
            if not settings.get("_labelvalues"):  # not a series of a family
                made.append(settings["name"])
            super().__init__(*args, **settings | {"registry": CollectorRegistry()})

    class OtherHistogram(Histogram):
        def __init__(self, *args: Any, **settings: Any) -> None:
            if not settings.get("_labelvalues"):
                made.append(settings["name"])
            super().__init__(*args, **settings | {"registry": CollectorRegistry()})

    class OtherLogger(PrometheusStatLogger):
        _counter_cls, _histogram_cls = OtherCounter, OtherHistogram

        def __init__(self) -> None:
            self.engine_indexes, self.per_engine_labelvalues = [0], {0: ["model", "0"]}

    TreeStatLogger.beside([OtherLogger()], counted.llm_engine.vllm_config)
    assert made == [metric.full_name for metric in METRICS]


def test_without_statistics_nothing_is_recorded(trees: Any) -> None:
    assert trees.llm_engine.logger_manager is None
    assert generate(trees, random_prompts(1, seed=95), greedy(5))


def test_an_installed_plugin_leaves_vllms_statistics_alone() -> None:
    code = (
        "import sys; from adaptivespec_vllm.plugin import register; register();"
        "assert 'adaptivespec_vllm.engine.metrics.carry' not in sys.modules;"
        "from adaptivespec_vllm.engine.metrics.carry import WRAPS;"
        "assert not any(wrap.installed() for wrap in WRAPS)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_a_configuration_that_arrives_opens_the_way(counted: Any) -> None:
    """In a process that is sent the configuration instead of building it, as the engine core is."""
    import pickle

    from adaptivespec_vllm.engine.metrics.carry import WRAPS

    sent = pickle.dumps(counted.llm_engine.vllm_config.speculative_config)
    assert all(wrap.installed() for wrap in WRAPS)
    for wrap in WRAPS:
        wrap.uninstall()
    try:
        pickle.loads(sent)
        assert all(wrap.installed() for wrap in WRAPS)
    finally:
        for wrap in WRAPS:
            wrap.install()
