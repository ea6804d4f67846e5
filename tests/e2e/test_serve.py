"""``vllm serve`` with a file, from outside: its own processes, HTTP, many clients."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.demo.model import prepare
from adaptivespec_vllm.runtime import cache_dir

PROMPTS = ["Name three fruits.", "What is 17 + 25?", "Write a haiku about rain.", "def fibonacci(n):"]
START_SECONDS = 480


class Server:
    """A running ``vllm serve`` on loopback."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        command = [str(Path(sys.executable).with_name("vllm")), "serve", *arguments, "--port", str(self.port)]
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self.process = subprocess.Popen(
            [*command, "--host", "127.0.0.1"],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment | {"VLLM_LOGGING_LEVEL": "INFO"},
            start_new_session=True,
        )

    def wait(self, seconds: float = START_SECONDS) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.5)
        pytest.fail(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as response:
            return response.read().decode()

    def complete(self, prompt: str, **parameters: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0} | parameters
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def stop(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with suppress(ProcessLookupError):  # a server that is stopped while it starts leaves its engine behind
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def demo() -> Any:
    return prepare(cache_dir(), lambda message: None)


def arguments(model: Path) -> list[str]:
    return [
        str(model),
        *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"),
        *("--kv-cache-memory-bytes", "200000000", "--enforce-eager"),
    ]


@pytest.fixture(scope="module")
def server(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    file = folder / "adaptivespec.json"
    file.write_text(json.dumps({"method": "adaptivespec", "model": str(demo.head)}))
    running = Server([*arguments(demo.model), "--speculative-config", str(file)], folder / "server.log")
    try:
        running.wait()
        yield running
    finally:
        running.stop()


def test_concurrent_clients_get_the_text_of_a_lone_one(server: Server) -> None:
    alone = [server.complete(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(server.complete, PROMPTS * 3))
    texts = [answer["choices"][0]["text"] for answer in together]
    assert texts == [answer["choices"][0]["text"] for answer in alone] * 3
    assert all(answer["usage"]["completion_tokens"] <= 24 for answer in together)


def test_log_says_what_is_on(server: Server, demo: Any) -> None:
    log = server.log.read_text()
    assert len(re.findall(r"AdaptiveSpec \S+ is on", log)) == 1
    for line in (
        r"method +EAGLE-3 draft trees on the V1 model runner, policy cost-aware",
        rf"head +{re.escape(str(demo.head))}, levels on packed weights",
        r"shapes +at most 24 nodes, 8 deep, 4 wide",
        r"verification +lossless: only the target's own choices are accepted",
        r"attention +vLLM's CPU kernel '\w+'",
    ):
        assert re.search(line, log), line
    assert not re.search(r"WARNING .*AdaptiveSpec verification", log)


def test_log_has_a_line_an_interval(server: Server) -> None:
    server.complete(PROMPTS[0])
    for _ in range(30):
        if found := re.search(
            r"AdaptiveSpec metrics: Mean accepted length: [\d.]+, Mean tree: .*", server.log.read_text()
        ):
            break
        time.sleep(1)
    assert found is not None, "vLLM's own interval is 10 seconds"


def test_vllms_own_metrics_count_trees(server: Server) -> None:
    server.complete(PROMPTS[0])
    lines = server.get("/metrics").splitlines()
    counts = {
        name: sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:spec_decode_num_{name}_total"))
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    assert 0 < counts["drafts"] < counts["draft_tokens"]
    assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"]


def test_a_bad_file_is_one_error(demo: Any, tmp_path: Path) -> None:
    file = tmp_path / "adaptivespec.json"
    file.write_text(json.dumps({"method": "adaptivespec", "model": str(demo.head), "tree": {"shpe": 3}}))
    broken = Server([*arguments(demo.model), "--speculative-config", str(file)], tmp_path / "server.log")
    try:
        assert broken.process.wait(START_SECONDS) != 0
    finally:
        broken.stop()
    log = broken.log.read_text()
    assert "error: argument --speculative-config" in log
    assert "tree.shpe: unknown key; did you mean 'shape'?" in log
    assert "Traceback" not in log
