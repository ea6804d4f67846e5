"""Clients that ask, leave and come back for a set time, and what became of every request."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.soak.answers import Answer, ask, judge
from benchmarks.soak.cases import Case
from benchmarks.soak.server import Server, ServerDied

_SHOWN_FAULTS = 20
_DRAIN_SECONDS = 600
_SAMPLE_SECONDS = 5.0


@dataclass
class Outcome:
    """Counts of one run.

    Attributes:
        verdicts: by kind of case, how often each verdict.
        faults: what was wrong, of the first requests.
        samples: seconds since the start, MB of the engine, MB of the front end, share of the KV cache in use.

    """

    verdicts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    faults: list[str] = field(default_factory=list)
    samples: list[tuple[float, float, float, float]] = field(default_factory=list)
    tokens: int = 0

    def add(self, case: Case, verdict: str, why: str = "") -> None:
        self.verdicts[case.kind][verdict] += 1
        if why and len(self.faults) < _SHOWN_FAULTS:
            self.faults.append(f"{case.kind}: {verdict}: {why}")

    def count(self, *verdicts: str) -> int:
        return sum(counts[verdict] for counts in self.verdicts.values() for verdict in verdicts)


async def plain_answers(server: Server, cases: list[Case], at_once: int = 8) -> dict[int, Answer]:
    """Answers of plain decoding with the likeliest tokens at each place, by the case's identity."""
    gate = asyncio.Semaphore(at_once)

    async def one(case: Case) -> Answer:
        async with gate:
            answer = await ask(server.http, case.body | {"logprobs": 20})
        assert answer is not None
        if answer.status != 200:
            raise ValueError(f"plain decoding refuses {case.kind} ({case.body}): {answer.message}")
        return answer

    known = [case for case in cases if case.check == "tokens"]
    return {id(case): answer for case, answer in zip(known, await asyncio.gather(*map(one, known)), strict=True)}


async def load(
    server: Server,
    draw: Callable[[random.Random], Case],
    plain: dict[int, Answer],
    clients: int,
    seconds: float,
    seed: int,
) -> Outcome:
    """Let clients work until the time is over, then wait until every request has its answer.

    Raises:
        ServerDied: the server ended, or requests did not.

    """
    outcome = Outcome()
    end = time.monotonic() + seconds
    watching = asyncio.create_task(_watch(server, outcome))
    working = asyncio.gather(
        *(_client(server, draw, plain, outcome, random.Random(f"{seed} {number}"), end) for number in range(clients))
    )
    try:
        async with asyncio.timeout(seconds + _DRAIN_SECONDS):
            await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            await working
    except TimeoutError:
        raise ServerDied(f"requests had no answer {_DRAIN_SECONDS} s after the end of the load") from None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    return outcome


async def _watch(server: Server, outcome: Outcome) -> None:
    while True:
        server.check()
        usage = (await server.metrics()).get("vllm:kv_cache_usage_perc", 0.0)
        outcome.samples.append((time.monotonic() - server.started, *server.memory(), usage))
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _client(
    server: Server,
    draw: Callable[[random.Random], Case],
    plain: dict[int, Answer],
    outcome: Outcome,
    rng: random.Random,
    end: float,
) -> None:
    while time.monotonic() < end:
        case = draw(rng)
        body = case.body | {"priority": rng.choice([-1, 0, 0, 1])}
        way = rng.choices(["whole", "stream", "leave", "cancel"], [50, 30, 12, 8])[0]
        if "prompt_logprobs" in body:  # vLLM does not stream these
            way = "whole"
        try:
            answer = await _ask(server.http, body, way, rng)
        except httpx.TransportError as error:
            server.check()
            outcome.add(case, "error", repr(error))
            continue
        if answer is None:
            outcome.add(case, "left")
            continue
        outcome.tokens += sum(len(choice.tokens) for choice in answer.choices)
        outcome.add(case, *judge(case, answer, plain.get(id(case))))


async def _ask(http: httpx.AsyncClient, body: dict[str, Any], way: str, rng: random.Random) -> Answer | None:
    if way == "whole":
        return await ask(http, body)
    if way == "stream":
        return await ask(http, body | {"stream": True})
    if way == "leave":
        return await ask(http, body | {"stream": True}, leave_after=rng.randint(1, 12))
    try:  # most often before the first token, some in the middle
        async with asyncio.timeout(rng.expovariate(2.0)):
            return await ask(http, body)
    except TimeoutError:
        return None
