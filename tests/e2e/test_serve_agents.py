"""``vllm serve`` with thoughts, schemas and tools that begin or end in the middle of drafted tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from openai import OpenAI

from tests.e2e.scripted import EOS, Script, make_scripted
from tests.e2e.test_serve import Server

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 9_999_999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}

THOUGHT = ["The user", " wants a ", "city. It ", "is Lyon."]
FENCED = ["```json\n", '{"town": ', '"Lyo', 'n", "size": ', '"large"', "}\n```", EOS]
OBEDIENT = ['{"city": "', "Ly", "on", '", "peo', 'ple": ', "52", "2250", "}", EOS]
# The marks of the first call are tokens of their own, those of the second one are cut anywhere.
FIRST = ["<tool_call>", '\n{"name": "wea', 'ther", "argu', 'ments": {"city": "Par', 'is", "people": 2', "100000}"]
FIRST += ["}\n", "</tool_call>"]
SECOND = ["\n<tool_", 'call>\n{"na', 'me": "ti', 'me", "arguments"', ': {"city": "Ro', "me", '", "mood": "sunny"']
SECOND += ["}", "}\n</tool", "_call>", EOS]
SCRIPTS = {"A": [*THOUGHT, "</think>", *FENCED], "B": ["I look ", "both up.\n", *FIRST, *SECOND]}
CHOICES = {
    **{before: [piece] for before, piece in itertools.pairwise(OBEDIENT)},
    "</think>": [OBEDIENT[0], "I look ", "<tool_call>"],  # where the fence is forbidden, and so on
    "me": ['", "people": '],  # where the mood is
    '", "people": ': ["2800"],
    "2800": ["000"],
    "000": ["}"],
    "}": ["}\n</tool"],
    "</tool_call>": [EOS],  # where one call is enough
}


class Answer(NamedTuple):
    """What a client gets, streamed or not."""

    reasoning: str | None
    content: str | None
    calls: list[tuple[str, str]]
    finish: str
    tokens: int
    chunks: int = 0


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Script, list[str]]:
    """The script, and what ``vllm serve`` is given for it."""
    folder = tmp_path_factory.mktemp("agents")
    script = make_scripted(folder / "target", folder / "head", SCRIPTS, CHOICES)
    shape = {"depth": 8, "width": 3, "nodes": 20}
    spec = {"method": "adaptivespec", "model": str(folder / "head"), "tree": {"policy": "static", "shape": shape}}
    return script, [
        *(str(folder / "target"), "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager", "--speculative-config", json.dumps(spec)),
        *("--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]


@pytest.fixture(scope="module")
def server(script: tuple[Script, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(script[1], tmp_path_factory.mktemp("agents-log") / "server.log")
    try:
        running.wait()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=60, max_retries=0)


def ask(client: OpenAI, stream: bool, **given: Any) -> Answer:
    asked = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "please A"}],
        "max_tokens": 80,
        "temperature": 0,
    } | given
    if not stream:
        whole = client.chat.completions.create(**asked)
        (choice,) = whole.choices
        message = choice.message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        reasoning = (message.model_extra or {}).get("reasoning")
        return Answer(reasoning, message.content, calls, choice.finish_reason, whole.usage.completion_tokens)
    reasoning, content, finish, tokens, chunks = "", "", "", 0, 0
    pieces: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        for choice in chunk.choices:
            chunks += 1
            reasoning += (choice.delta.model_extra or {}).get("reasoning") or ""
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                known = pieces.setdefault(call.index, ["", ""])
                known[0] += call.function.name or ""
                known[1] += call.function.arguments or ""
    calls = [(name, arguments) for _, (name, arguments) in sorted(pieces.items())]
    return Answer(reasoning or None, content or None, calls, finish, tokens, chunks)


def tool(name: str, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": strict}}


def without(script: Script, *pieces: str) -> dict[str, Any]:
    """A request for which these pieces are not to be chosen."""
    return {"logit_bias": {str(script.ids[piece]): -100 for piece in pieces}}


both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@both
def test_without_a_schema_the_fence_is_there(client: OpenAI, stream: bool) -> None:
    """So that it is the schema, below, that keeps it away."""
    answer = ask(client, stream)
    assert answer[:5] == ("".join(THOUGHT), "".join(FENCED[:-1]), [], "stop", 12)
    assert not stream or answer.chunks < 8, "one token a chunk: nothing was drafted"


@both
def test_a_schema_holds_from_the_end_of_a_thought_inside_a_tree(client: OpenAI, stream: bool) -> None:
    answer = ask(client, stream, response_format=FORMAT)
    assert answer[:5] == ("".join(THOUGHT), '{"city": "Lyon", "people": 522250}', [], "stop", 14)
    assert not stream or answer.chunks < 10


@both
@pytest.mark.parametrize("strict", [False, True])
def test_two_tool_calls(client: OpenAI, script: tuple[Script, list[str]], stream: bool, strict: bool) -> None:
    """Both are complete; a strict tool's arguments obey its schema, the others are what the target says."""
    tools = [tool("weather", strict=strict), tool("time", strict=strict)]
    given = without(script[0], FENCED[0], OBEDIENT[0])
    answer = ask(client, stream, tools=tools, **given)
    first, second = answer.calls
    assert first == ("weather", '{"city": "Paris", "people": 2100000}')
    assert second == ("time", '{"city": "Rome", %s}' % ('"people": 2800000' if strict else '"mood": "sunny"'))
    assert (answer.reasoning, answer.finish) == ("".join(THOUGHT), "tool_calls")
    assert (answer.content or "").strip() == "I look both up."
    assert not stream or answer.chunks < 14


@both
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_asked_for(client: OpenAI, stream: bool, choice: Any) -> None:
    """The grammar of a call begins behind the thought, and its marks are drafted tokens."""
    answer = ask(client, stream, tools=[tool("weather", strict=True)], tool_choice=choice)
    assert answer.reasoning == "".join(THOUGHT)
    assert answer.calls == [("weather", '{"city": "Paris", "people": 2100000}')]


def test_all_at_once(client: OpenAI, script: tuple[Script, list[str]]) -> None:
    """Requests with and without a grammar in one batch answer as they do alone."""
    from concurrent.futures import ThreadPoolExecutor

    kinds: list[dict[str, Any]] = [
        {},
        {"response_format": FORMAT},
        {"tools": [tool("weather"), tool("time", strict=True)], **without(script[0], FENCED[0], OBEDIENT[0])},
        {"tools": [tool("weather", strict=True)], "tool_choice": "required"},
    ]
    alone = [ask(client, True, **kind)[:5] for kind in kinds]
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(lambda kind: ask(client, True, **kind)[:5], kinds * 4))
    assert together == alone * 4


def test_the_log_has_no_complaint(server: Server) -> None:
    """Runs last."""
    log = server.log.read_text()
    for complaint in ("Traceback", "Failed to advance", "Unexpected: grammar", " ERROR "):
        assert complaint not in log, log[log.index(complaint) - 500 :][:3000]
    assert " 500 Internal" not in log
    lines = [line for line in server.get("/metrics").splitlines() if "num_accepted_tokens_total" in line]
    assert sum(float(line.split()[-1]) for line in lines if line[0] != "#") > 200
