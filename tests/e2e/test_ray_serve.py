"""``adaptivespec serve-ray`` from outside: a local cluster, two replicas, one ended under load."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

pytest.importorskip("ray.serve.llm")

MODEL = "tiny"
START_SECONDS = 520
PROMPTS = ["the cat sat", "once upon a time", "a b c d e f", "zebra"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Application:
    """A running ``adaptivespec serve-ray``."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self.log = folder / "serve.log"
        file = folder / "app.yaml"
        more = {
            "http": {"port": self.port},
            "ray": {"num_cpus": 8, "temp_dir": tempfile.mkdtemp(prefix="r"), "metrics_port": self.metrics_port},
        }
        file.write_text(yaml.safe_dump(config | more))
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "adaptivespec_vllm.cli", "serve-ray", str(file)],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
        )
        self.answered: list[str] = []
        """Texts of requests that were answered, of all tests."""
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)

    def wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            if "serving on" in self.log.read_text():
                return
            time.sleep(0.5)
        pytest.fail(f"it did not start:\n{self.log.read_text()[-3000:]}")

    def complete(self, prompt: str, **parameters: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | parameters
        return self.client.post("/v1/completions", json=body)

    def text(self, prompt: str) -> str:
        response = self.complete(prompt)
        assert response.status_code == 200, response.text
        self.answered.append(response.json()["choices"][0]["text"])
        return self.answered[-1]

    def replicas(self) -> list[psutil.Process]:
        """The replicas' processes."""
        title = f"LLMServer:{MODEL}"
        ours = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in ours if any(title in part for part in one.cmdline())]

    def metrics(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30).text

    def stop(self) -> list[psutil.Process]:
        """End it as a user does; what it started and left behind, which is ended too."""
        if self.process.poll() is not None:
            return []
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(90)
        finally:
            _, left = psutil.wait_procs(started, timeout=20)
            for one in left:
                one.kill()
        return left


@pytest.fixture(scope="module")
def application(tiny_speaker: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    folder = tmp_path_factory.mktemp("serve-ray")
    shape = {"depth": 3, "width": 2, "nodes": 4}
    method = {"method": "adaptivespec", "model": str(tiny_head), "tree": {"policy": "static", "shape": shape}}
    (folder / "adaptivespec.json").write_text(json.dumps(method))
    model = {
        "name": MODEL,
        "model": str(tiny_speaker),
        "adaptivespec": "adaptivespec.json",
        "engine": {
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 4,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 16 << 20,
            "block_size": 32,
        },
        "deployment": {"num_replicas": 2, "health_check_period_s": 1, "health_check_timeout_s": 20},
    }
    running = Application({"models": [model]}, folder)
    try:
        running.wait()
        yield running
    finally:
        running.stop()


def test_concurrent_requests_get_the_text_of_lone_ones(application: Application) -> None:
    alone = [application.text(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(application.text, PROMPTS * 4))
    assert together == alone * 4


def test_answers_are_streamed(application: Application) -> None:
    body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    parts = []
    with application.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    application.answered.append("".join(parts))
    assert len(parts) > 2
    assert "".join(parts) == application.text(PROMPTS[0])


def test_what_vllm_refuses_is_refused_by_name(application: Application) -> None:
    response = application.complete(PROMPTS[0], max_tokens=5000)
    assert response.status_code == 400
    assert "max_tokens" in response.text


def test_a_conversation_stays_on_the_replica_that_has_its_prefix(application: Application) -> None:
    def requests() -> dict[str, float]:
        found = re.findall(
            r'^ray_vllm_request_success_total\{.*ReplicaId="(\w+)".*\} (\S+)$', application.metrics(), re.M
        )
        counts: dict[str, float] = {}
        for replica, value in found:
            counts[replica] = counts.get(replica, 0) + float(value)
        return counts

    def settled() -> dict[str, float]:
        """Counts of all requests so far; Ray collects metrics every few seconds."""
        for _ in range(180):
            counts = requests()
            if sum(counts.values()) >= len(application.answered):
                return counts
            time.sleep(0.5)
        raise AssertionError(f"{counts}: fewer than {len(application.answered)} requests")

    before, text = settled(), "a long conversation about many things "
    for _ in range(6):
        text += application.text(text)
    after = settled()
    gained = sorted(after[replica] - before.get(replica, 0) for replica in after)
    assert gained[-1] == 6, gained


def test_our_metrics_are_at_rays_endpoint(application: Application) -> None:
    application.text(PROMPTS[1])
    for _ in range(60):
        found = re.findall(
            r'^ray_vllm_adaptivespec_drafted_nodes_count\{.*model_name="tiny".*\} (\S+)$', application.metrics(), re.M
        )
        if sum(map(float, found)) > 0:
            return
        time.sleep(0.5)
    pytest.fail("no tree was counted")


def test_a_replica_that_dies_takes_only_its_own_requests_with_it(application: Application) -> None:
    prompts = [f"{prompt} {i}" for i in range(10) for prompt in PROMPTS]

    def ask(prompt: str) -> httpx.Response | str:
        try:
            return application.complete(prompt, max_tokens=200)
        except httpx.HTTPError as error:
            return repr(error)

    victim, *_ = application.replicas()
    family = [victim, *victim.children(recursive=True)]
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(ask, prompt) for prompt in prompts]
        while not any(one.done() for one in asked):
            time.sleep(0.05)
        victim.kill()
        answers = [one.result() for one in asked]
    answered = [a for a in answers if isinstance(a, httpx.Response) and a.status_code == 200]
    failed = [a if isinstance(a, str) else f"{a.status_code} {a.text}" for a in answers if a not in answered]
    assert all(a.json()["usage"]["completion_tokens"] == 200 for a in answered)
    assert len(failed) <= 8, failed  # those in flight at that moment
    assert all(isinstance(a, httpx.Response) and a.status_code >= 500 for a in answers if a not in answered), failed
    assert application.text(PROMPTS[0])
    _, left = psutil.wait_procs(family, timeout=60)
    assert not left, "processes of the replica that died"


def test_nothing_is_left_when_it_ends(application: Application) -> None:
    assert application.stop() == []
    assert application.process.returncode == 0
