"""``adaptivespec batch`` on Ray Data: an engine ends while it works; nothing is lost, nothing is there twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray.data")

ROWS = 48
SECONDS = 400


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Batch:
    """``adaptivespec batch`` as a process."""

    def __init__(self, folder: Path, target: Path, head: Path, *options: str) -> None:
        method = {"method": "adaptivespec", "model": str(head)}
        method["tree"] = {"policy": "static", "shape": {"depth": 3, "width": 2, "nodes": 4}}
        self.source, self.output, self.log = folder / "in.jsonl", folder / "out.jsonl", folder / "batch.log"
        self.partial = folder / "out.jsonl.partial"
        self.source.write_text(
            "".join(
                json.dumps({"prompt": f"row {i}", "max_tokens": 60, "temperature": 0, "ignore_eos": True}) + "\n"
                for i in range(ROWS)
            )
        )
        self.command = [
            *(sys.executable, "-m", "adaptivespec_vllm.cli", "batch", str(self.source), str(self.output), *options),
            *("--model", str(target), "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4"),
            *("--enforce-eager", "--kv-cache-memory-bytes", str(16 << 20), "--block-size", "32"),
            *("--speculative-config", json.dumps(method)),
        ]

    def start(self) -> psutil.Popen:
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        return psutil.Popen(self.command, stdout=self.log.open("w"), stderr=subprocess.STDOUT, env=environment)

    def kept(self) -> int:
        """Rows that are answered on disk."""
        return max(len(self.partial.read_text().splitlines()) - 1, 0) if self.partial.exists() else 0

    def until_kept(self, process: psutil.Popen, rows: int) -> None:
        end = time.monotonic() + SECONDS
        while self.kept() < rows:
            assert process.poll() is None and time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.02)


@pytest.fixture
def batch(tmp_path: Path, tiny_speaker: Path, tiny_head: Path) -> Iterator[Batch]:
    yield Batch(tmp_path, tiny_speaker, tiny_head, "--ray", "--engines", "2", "--rows-per-task", "2")


def test_rows_survive_an_engine_and_the_run_itself(batch: Batch) -> None:
    process = batch.start()
    try:
        batch.until_kept(process, 4)
        family = process.children(recursive=True)
        victim = next(one for one in family if any("MapWorker" in part for part in one.cmdline()))
        victim.kill()
        assert process.wait(SECONDS) == 0, batch.log.read_text()[-3000:]
    finally:
        for one in [process, *process.children(recursive=True)] if process.is_running() else []:
            one.kill()
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left
    answers = lines(batch.output)
    assert [answer["custom_id"] for answer in answers] == [f"line-{i}" for i in range(1, ROWS + 1)]
    assert all(answer["response"]["body"]["usage"]["completion_tokens"] == 60 for answer in answers)
    assert not batch.partial.exists()
