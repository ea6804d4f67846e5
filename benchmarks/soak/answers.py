"""Answers of a server, and how they compare with those of plain decoding."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from benchmarks.soak.cases import Case

Verdict = Literal["right", "near-tie", "wrong", "error"]

TIE = 1e-4
"""Nats below which two tokens tie: floating point decides between them."""
_SAME_LOGPROB = 1e-3


@dataclass
class Choice:
    """One of a request's answers: tokens, what came with them, how it ended."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    chosen: list[float] = field(default_factory=list)
    """Log-probability of each token, where asked for."""
    top: list[dict[int, float]] = field(default_factory=list)
    """The likeliest tokens at each place, where asked for."""
    finish: str | None = None

    def add(self, part: dict[str, Any]) -> None:
        """A response's choice, or a chunk of it."""
        self.tokens += part.get("token_ids") or []
        self.text += part["text"]
        self.finish = part.get("finish_reason") or self.finish
        if logprobs := part.get("logprobs"):
            self.chosen += logprobs["token_logprobs"]
            self.top += [
                {int(token.removeprefix("token_id:")): value for token, value in place.items()}
                for place in logprobs["top_logprobs"] or []
            ]


@dataclass
class Answer:
    """What came back of a request."""

    status: int
    choices: list[Choice] = field(default_factory=list)
    message: str = ""


async def ask(http: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None) -> Answer | None:
    """Send a request.

    Args:
        http: client of the server.
        body: of ``/v1/completions``; ``stream`` decides how the answer comes.
        leave_after: disconnect after so many chunks of a stream; there is no answer then.

    """
    body = {"return_token_ids": True, "return_tokens_as_token_ids": True} | body
    choices = [Choice() for _ in range(body.get("n", 1))]
    if not body.get("stream"):
        reply = await http.post("/v1/completions", json=body)
        if reply.is_success:
            for part in reply.json()["choices"]:
                choices[part["index"]].add(part)
        return Answer(reply.status_code, choices, "" if reply.is_success else reply.text)
    chunks = 0
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        if not reply.is_success:
            return Answer(reply.status_code, [], (await reply.aread()).decode())
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            data = json.loads(line.removeprefix("data: "))
            if "error" in data:  # found after the stream had begun
                return Answer(int(data["error"].get("code") or 500), choices, line)
            for part in data["choices"]:
                choices[part["index"]].add(part)
            chunks += 1
            if leave_after is not None and chunks >= leave_after:
                return None
    return Answer(200, choices)


def judge(case: Case, answer: Answer, plain: Answer | None) -> tuple[Verdict, str]:
    """Whether an answer is what it must be, and what is wrong with it."""
    if case.check == "refused":
        return ("right", "") if answer.status == 400 else ("wrong", f"HTTP {answer.status}, not 400")
    if answer.status != 200:
        return "error", f"HTTP {answer.status}: {answer.message[:300]}"
    if case.check == "form":
        return _form(case, answer)
    assert plain is not None
    for ours, theirs in zip(answer.choices, plain.choices, strict=True):
        verdict, why = _same(case, ours, theirs)
        if verdict != "right":
            return verdict, why
    return "right", ""


def _form(case: Case, answer: Answer) -> tuple[Verdict, str]:
    most = case.body["max_tokens"]
    for choice in answer.choices:
        if choice.finish not in ("stop", "length") or not 0 < len(choice.tokens) <= most:
            return "wrong", f"{len(choice.tokens)} of {most} tokens, finished by {choice.finish}"
        if case.body.get("ignore_eos") and len(choice.tokens) != most:
            return "wrong", f"{len(choice.tokens)} tokens, not {most}"
    return "right", ""


def _same(case: Case, ours: Choice, theirs: Choice) -> tuple[Verdict, str]:
    if ours.tokens != theirs.tokens:
        at = next((i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)) if a != b), None)
        if at is None:
            return "wrong", f"{len(ours.tokens)} tokens, plain decoding has {len(theirs.tokens)}"
        top = theirs.top[at]
        gap = abs(top.get(ours.tokens[at], -math.inf) - top.get(theirs.tokens[at], math.inf))
        tie = case.strict and gap < TIE
        return "near-tie" if tie else "wrong", f"token {at} of {len(theirs.tokens)} differs, {gap:.2e} nats apart"
    if ours.finish != theirs.finish or ours.text != theirs.text:
        return "wrong", f"the text or its end differs: {ours.finish} {ours.text!r}, {theirs.finish} {theirs.text!r}"
    if case.body.get("logprobs"):
        if len(ours.chosen) != len(ours.tokens):
            return "wrong", f"{len(ours.chosen)} log-probabilities of {len(ours.tokens)} tokens"
        worst = max(abs(a - b) for a, b in zip(ours.chosen, theirs.chosen, strict=True))
        if worst > _SAME_LOGPROB:
            return "wrong", f"a log-probability is off by {worst:.2e}"
    return "right", ""
