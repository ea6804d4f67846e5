"""Arms take turns: each batch of prompts is decoded by every arm before the next one is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from adaptivespec_vllm.bench import memory
from adaptivespec_vllm.bench.arms import PLAIN
from adaptivespec_vllm.bench.engines import Engine
from adaptivespec_vllm.bench.prompts import Encoded
from adaptivespec_vllm.bench.result import Place, Result, Sample

WARM_UP_TOKENS = 16
_DRAFTED = {"nodes": "drafted_nodes", "depth": "drafted_depth", "width": "drafted_width", "steps": "steps"}


@dataclass
class Decoded:
    """A batch of prompts decoded: the texts, and what was measured from their first tokens on."""

    texts: list[list[int]]
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    engine_steps: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    """Steps of single requests by the number of tokens emitted."""
    counters: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return self.lengths.total()

    @property
    def emitted(self) -> int:
        return sum(length * count for length, count in self.lengths.items())

    def reached(self) -> list[int]:
        """Steps whose accepted path reached depth 1, 2, ...; of n emitted tokens n - 1 were accepted drafts."""
        deepest = max(self.lengths, default=1) - 1
        return [sum(c for n, c in self.lengths.items() if n > depth) for depth in range(1, deepest + 1)]


Parameters = Callable[[int, int], Any]
"""Sampling parameters of a request: its number, and how many tokens it may have."""


def sampling(temperature: float, seed: int, **more: Any) -> Parameters:
    """Parameters that are the same for every arm, and so are the seeds where there is something to draw."""

    def parameters(number: int, tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        drawn = {"seed": seed + number} if temperature > 0 else {}
        return SamplingParams(
            temperature=temperature, max_tokens=tokens, output_kind=RequestOutputKind.DELTA, **drawn, **more
        )

    return parameters


def decode(engine: Engine, prompts: Sequence[Encoded], tokens: int, parameters: Parameters) -> Decoded:
    """Decode a batch, without help of what is cached of earlier turns."""
    driver = engine.llm.llm_engine
    engine.llm.reset_prefix_cache()
    numbers: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        engine.requests += 1
        numbers[str(engine.requests)] = number
        driver.add_request(str(engine.requests), {"prompt_token_ids": list(prompt.tokens)}, parameters(number, tokens))
    result = Decoded([[] for _ in prompts])
    without_token = set(range(len(prompts)))
    started = first = last = time.perf_counter()
    while driver.has_unfinished_requests():
        fresh = [(numbers[output.request_id], output.outputs[0].token_ids) for output in driver.step()]
        now = time.perf_counter()
        fresh = [(number, ids) for number, ids in fresh if ids]
        for number, ids in fresh:
            result.texts[number].extend(ids)
        if without_token:
            without_token.difference_update(number for number, _ in fresh)
            engine.counters()  # reading resets them
            first = last = time.perf_counter()
            continue
        if fresh:
            result.engine_steps += 1
            result.lengths.update(len(ids) for _, ids in fresh)
            last = now
    result.prefill_seconds, result.seconds = first - started, last - first
    result.counters = engine.counters()
    return result


@dataclass(frozen=True)
class Turn:
    """A batch of prompts that every arm decodes now, in the order given."""

    place: Place
    group: int
    round: int
    prompts: list[Encoded]
    order: list[Engine]


def turns(engines: Sequence[Engine], plan: dict[Place, list[list[Encoded]]], repeats: int) -> Iterator[Turn]:
    """All turns of a run. The order rotates, so that no arm always follows the same one or begins."""
    number = 0
    for place, groups in plan.items():
        for repeat in range(repeats):
            for group, prompts in enumerate(groups):
                start = number % len(engines)
                yield Turn(place, group, repeat, prompts, [*engines[start:], *engines[:start]])
                number += 1


def warm_up(engines: Sequence[Engine], prompts: Sequence[Encoded], tokens: int, parameters: Parameters) -> None:
    """Let every arm decode once what it is about to be measured on."""
    for engine in engines:
        decode(engine, prompts, min(tokens, WARM_UP_TOKENS), parameters)


def take(turn: Turn, tokens: int, parameters: Parameters, tick: Callable[[str], None]) -> list[Sample]:
    """One turn of every arm; ``tick`` is told the arm that comes next."""
    decoded: dict[str, tuple[Decoded, int | None]] = {}
    for engine in turn.order:
        tick(engine.arm.name)
        held = memory.device_allocated()
        memory.device_peak(reset=True)
        own = decode(engine, turn.prompts, tokens, parameters)
        peak = memory.device_peak()
        decoded[engine.arm.name] = own, (None if peak is None or held is None else peak - held)
    plain = decoded[PLAIN][0].texts
    return [_sample(name, turn, own, plain, peak) for name, (own, peak) in decoded.items()]


def _sample(name: str, turn: Turn, decoded: Decoded, plain: list[list[int]], peak: int | None) -> Sample:
    counted = decoded.counters
    return Sample(
        arm=name,
        place=turn.place,
        kind=turn.prompts[0].kind,
        group=turn.group,
        round=turn.round,
        prompts=[prompt.id for prompt in turn.prompts],
        prompt_tokens=sum(len(prompt.tokens) for prompt in turn.prompts),
        prefill_seconds=decoded.prefill_seconds,
        seconds=decoded.seconds,
        emitted=decoded.emitted,
        steps=decoded.steps,
        engine_steps=decoded.engine_steps,
        reached=decoded.reached(),
        drafted={name: counted[key] for name, key in _DRAFTED.items()} if "steps" in counted else {},
        promotions=counted.get("promotions"),
        sections=counted["seconds"],
        same_text=sum(own == other for own, other in zip(decoded.texts, plain, strict=True)),
        device_peak_bytes=peak,
    )


def run(
    result: Result,
    engines: Sequence[Engine],
    plan: dict[Place, list[list[Encoded]]],
    *,
    tokens: int,
    repeats: int,
    parameters: Parameters,
    tick: Callable[[str], None] = lambda arm: None,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Measure, adding to ``result`` turn by turn; ``done`` is called after each turn."""
    warm: set[Place] = set()
    for turn in turns(engines, plan, repeats):
        if turn.place not in warm:
            warm_up(engines, turn.prompts, tokens, parameters)
            warm.add(turn.place)
        result.samples += take(turn, tokens, parameters, tick)
        done()
