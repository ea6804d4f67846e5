"""A ``vllm serve`` process on loopback, its metrics and its memory."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

START_SECONDS = 600
_SAMPLE = re.compile(r"^(?P<name>vllm:\w+)(?:\{[^}]*\})? (?P<value>\S+)$", re.MULTILINE)


class ServerDied(Exception):
    """The server ended by itself."""


class Server:
    """A running server; use it as an asynchronous context, which also ends it.

    Args:
        arguments: of ``vllm serve``, without host and port.
        log: where its output goes.

    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._arguments, self._log = arguments, log

    async def __aenter__(self) -> Server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [str(Path(sys.executable).with_name("vllm")), "serve", *self._arguments]
        # The development endpoints hand out our counters; the address is loopback's.
        # oneDNN keeps code for each number of rows that it met, up to 1024 of them: memory that grows but is no leak.
        environment = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        }
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with self._log.open("w") as log:
            self._process = psutil.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=600, limits=httpx.Limits(max_connections=None)
        )
        try:
            await self._wait()
        except BaseException:
            await self.__aexit__()
            raise
        self.started = time.monotonic()
        return self

    async def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            self.check()
            try:
                if (await self.http.get("/health")).is_success:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.5)
        raise ServerDied(f"not ready after {START_SECONDS} s; its log: {self._log}")

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()
        if self._process.poll() is None:
            children = self._process.children(recursive=True)
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, 60)
            except psutil.TimeoutExpired:
                self._process.kill()
            for child in children:  # a server that is stopped while it starts leaves its engine behind
                with suppress(psutil.NoSuchProcess):
                    child.kill()

    def check(self) -> None:
        """Raise if the process has ended."""
        if self._process.poll() is not None:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise ServerDied(f"the server ended with status {self._process.returncode}; its log ends:\n{tail}")

    def memory(self) -> tuple[float, float]:
        """Resident megabytes of the engine's process (the largest child) and of the front end."""
        children = [child.memory_info().rss for child in self._process.children(recursive=True) if child.is_running()]
        return max(children, default=0) / 1e6, self._process.memory_info().rss / 1e6

    async def metrics(self) -> dict[str, float]:
        """vLLM's metrics by name, summed over labels."""
        values: dict[str, float] = {}
        for sample in _SAMPLE.finditer((await self.http.get("/metrics")).text):
            values[sample["name"]] = values.get(sample["name"], 0.0) + float(sample["value"])
        return values

    async def counters(self) -> dict[str, Any]:
        """Our own counters since the last call."""
        reply = await self.http.post("/collective_rpc", json={"method": "adaptivespec_stats"})
        return reply.json()["results"][0]

    def faults(self) -> list[str]:
        """Errors of the engine in the log. (The front end also logs those that it answers with HTTP 400.)"""
        lines = self._log.read_text(errors="replace").splitlines()
        return [line for line in lines if " ERROR " in line and line.startswith(("(EngineCore", "(Worker"))]
