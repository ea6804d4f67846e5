"""Metrics of ``vllm serve`` with two API servers, an engine core and a worker: four processes, one truth."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.mmap_dict import MmapedDict

from adaptivespec_vllm.engine.decision_log import VARIABLE, read_log
from adaptivespec_vllm.engine.metrics.catalogue import METRICS, OVERHEAD, PREFIX
from tests.e2e.test_serve import START_SECONDS, Server, arguments, demo  # noqa: F401  (a fixture)

SECRET = "zebrafruit"
QUESTIONS = [f"Tell me a story about a {SECRET} and the number {number}." for number in range(6)]
DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "adaptivespec.json"


class Served(Server):
    """The server, and what it decoded so far."""

    decisions: Path
    recorded: Path
    """Where each API server keeps the values of its metrics."""
    answers: list[dict[str, Any]]

    def chat(self, question: str, **parameters: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0} | parameters
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Connection": "close"},  # each request may meet another API server
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def values(self) -> dict[str, float]:
        """Sums of all series by name, and by name and label value where there is a label of ours."""
        sums: defaultdict[str, float] = defaultdict(float)
        for line in self.get("/metrics").splitlines():
            if line.startswith("vllm:"):
                series, value = line.rsplit(" ", 1)
                name, _, labels = series.partition("{")
                sums[name] += float(value)
                for label in re.findall(r'(?:path|reason|part|guard)="(\w+)"', labels):
                    sums[f"{name}/{label}"] += float(value)
        return dict(sums)

    def settled(self) -> dict[str, float]:
        """Values after the last step's have arrived: an answer may be faster than its own counts."""
        values = self.values()
        for _ in range(20):
            time.sleep(0.25)
            values, before = self.values(), values
            if values == before:
                break
        return values


@pytest.fixture(scope="module")
def served(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:  # noqa: F811
    folder = tmp_path_factory.mktemp("metrics")
    file = folder / "adaptivespec.json"
    settings = {
        "method": "adaptivespec",
        "model": str(demo.head),
        "tree": {"policy": "adaptive"},
        "margin": {"kappa": 0.2},
        "guard": {"max_regret": 4.0},
    }
    file.write_text(json.dumps(settings))
    options = ["--speculative-config", str(file), "--api-server-count", "2"]
    options += ["--per-request-spec-decode-metrics", "summary"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder / "decisions.jsonl"))
        patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
        running = Served([*arguments(demo.model), *options], folder / "server.log")
    running.decisions, running.recorded = folder / "decisions.jsonl", folder
    try:
        running.wait(2 * START_SECONDS)  # four processes that import vLLM
        with ThreadPoolExecutor(4) as clients:
            running.answers = list(clients.map(running.chat, QUESTIONS * 2))
        yield running
    finally:
        running.stop()


def records(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer["metrics"]["speculative_decoding"] for answer in answers]


def test_both_api_servers_recorded_a_part(served: Served) -> None:
    """Otherwise the sums below would say nothing about several."""
    sums = {}
    for path in served.recorded.glob("histogram_*.db"):
        values = MmapedDict.read_all_values_from_file(str(path))
        sums[path.name] = sum(value for key, value, *_ in values if f"{PREFIX}accepted_length_sum" in key)
    assert sorted(sum > 0 for sum in sums.values())[-2:] == [True, True], sums


def test_counts_of_all_api_servers_add_up(served: Served) -> None:
    values = served.settled()
    ours = {name.removeprefix(PREFIX): value for name, value in values.items() if name.startswith(PREFIX)}
    assert ours["drafted_nodes_count"] == values["vllm:spec_decode_num_drafts_total"] > 0
    assert ours["drafted_nodes_sum"] == values["vllm:spec_decode_num_draft_tokens_total"]
    emitted, steps = ours["accepted_length_sum"], ours["accepted_length_count"]
    assert emitted - steps == values["vllm:spec_decode_num_accepted_tokens_total"] > 0
    tokens = sum(answer["usage"]["completion_tokens"] for answer in served.answers)
    assert tokens <= emitted <= tokens + 7 * len(served.answers), "a last step may have gone beyond max_tokens"
    assert 0 < ours["engine_steps_total/tree"] <= ours["engine_steps_total"] <= steps
    assert all(ours[f"overhead_seconds_total/{part}"] > 0 for part in OVERHEAD)


def test_every_metric_is_there_from_the_start(served: Served) -> None:
    shown = set(served.values())
    assert [name for metric in METRICS for name in metric.shown if name not in shown] == []
    series = [f"{metric.shown[0]}/{value}" for metric in METRICS for value in metric.values]
    assert [one for one in series if one not in shown] == []


def test_everything_on_the_dashboard_is_there(served: Served) -> None:
    queries = json.dumps(json.loads(DASHBOARD.read_text())["panels"])
    shown = set(served.values())
    assert [name for name in sorted(set(re.findall(r"vllm:[a-z_]+", queries))) if name not in shown] == []


def test_records_of_requests_add_up(served: Served) -> None:
    values, own = served.settled(), records(served.answers)
    assert sum(record["num_promoted_tokens"] for record in own) == values[f"{PREFIX}promotions_total"] > 0
    nats = sum(record["logprob_given_up"] for record in own)
    assert nats == pytest.approx(values[f"{PREFIX}logprob_given_up_nats_total"], rel=1e-4)
    assert max(record["logprob_given_up"] for record in own) <= 4.0
    assert values[f"{PREFIX}guard_trips_total/max_regret"] > 0
    assert sum(record["num_draft_tokens"] for record in own) == values[f"{PREFIX}drafted_nodes_sum"]


def test_no_text_anywhere(served: Served) -> None:
    """Neither questions nor answers, in the log, in the metrics or in the decisions."""
    words = {SECRET}
    words |= {word for a in served.answers for word in re.findall(r"\w{9,}", a["choices"][0]["message"]["content"])}
    events = read_log(served.decisions)
    assert len(events) > 50 and {"begin", "observe", "forget"} <= {event["call"] for event in events}
    for where in (served.log.read_text(), served.get("/metrics"), served.decisions.read_text()):
        assert SECRET not in where
    said = served.decisions.read_text() + served.get("/metrics")
    assert [word for word in words if word in said] == []
    assert all("tokens" not in json.dumps(event) for event in events)


def test_a_lossy_rule_is_warned_about_once(served: Served) -> None:
    log = served.log.read_text()
    assert len(re.findall(r"WARNING .*AdaptiveSpec verification is lossy", log)) == 1
    assert len(re.findall(r"AdaptiveSpec \S+ is on", log)) == 1
    assert re.search(rf"decisions +logged to {re.escape(str(served.decisions))}", log)
    assert "strict after 4.0 nats given up" in log
