"""The target's own answers, generated with vLLM: one JSON line an answer, written as soon as it is finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adaptivespec_vllm import chat
from adaptivespec_vllm.training.prompts import Prompt, own_prompts, user_turn

Progress = Callable[[int, int, int], None]
"""Called with (answers done, answers in all, tokens so far)."""


@dataclass(frozen=True)
class Answer:
    """One answer of the target."""

    id: str
    kind: str
    temperature: float
    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class Sampling:
    """How prompts are answered.

    Args:
        temperatures: one answer to each prompt for each of these; 0 is greedy.
        max_tokens: longest answer, in tokens.
        seed: of the engine. Draws depend on which requests share a batch, so an interrupted run draws others.

    """

    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_tokens: int = 512
    seed: int = 0


def read_answers(path: Path) -> Iterator[Answer]:
    """Answers of a file; a last line that an interruption cut short is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield Answer(**json.loads(line))


def generate(llm: Any, prompts: list[Prompt], sampling: Sampling, path: Path, progress: Progress) -> None:
    """Answer what is not yet answered in ``path``.

    Requests go to the engine one by one, not in rounds: the batch stays full until the last ones.
    """
    from vllm import SamplingParams

    _drop_partial_line(path)
    done = {(answer.id, answer.temperature): len(answer.answer_ids) for answer in read_answers(path)}
    tokens, total = sum(done.values()), len(prompts) * len(sampling.temperatures)
    tokenizer, engine = llm.get_tokenizer(), llm.llm_engine
    limit = llm.model_config.max_model_len
    waiting: dict[str, tuple[Prompt, float, list[int]]] = {}
    for index, prompt in enumerate(prompts):
        ids = chat.encode(tokenizer, prompt.messages)
        room = limit - len(ids)
        for temperature in sampling.temperatures:
            if (prompt.id, temperature) in done or room < 2:
                continue
            request = f"{index}@{temperature}"
            waiting[request] = (prompt, temperature, ids)
            engine.add_request(
                request,
                {"prompt_token_ids": ids},
                SamplingParams(temperature=temperature, max_tokens=min(sampling.max_tokens, room), detokenize=False),
            )
    finished = len(done)
    progress(finished, total, tokens)
    with path.open("a", encoding="utf-8") as file:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                prompt, temperature, ids = waiting.pop(output.request_id)
                answer = Answer(prompt.id, prompt.kind, temperature, ids, list(output.outputs[0].token_ids))
                file.write(json.dumps(asdict(answer)) + "\n")
                finished, tokens = finished + 1, tokens + len(answer.answer_ids)
            file.flush()
            progress(finished, total, tokens)


def write_prompts(llm: Any, count: int) -> list[Prompt]:
    """Messages that the target itself would expect of a user, drawn at temperature 1."""
    from vllm import SamplingParams

    before, end = user_turn(llm.get_tokenizer())
    sampling = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=160, stop=[end], n=1)
    drawn = llm.generate([{"prompt_token_ids": before}] * count, sampling, use_tqdm=False)
    return list(own_prompts([output.outputs[0].text for output in drawn if output.outputs[0].finish_reason == "stop"]))


def _drop_partial_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        path.write_bytes(content[: content.rfind(b"\n") + 1])
