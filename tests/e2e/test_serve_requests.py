"""Requests to ``vllm serve`` as clients send them: streams, stops, usage, formats, tools, overrides, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from adaptivespec_vllm.demo.model import prepare
from adaptivespec_vllm.runtime import cache_dir
from tests.e2e.test_serve import PROMPTS, Server, arguments

STREAMED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.7, "seed": 3},
    "stop strings": {"stop": ["\n", " of", "."]},
    "stop string kept": {"stop": [" the"], "extra_body": {"include_stop_str_in_output": True}},
    "stop ids": {"extra_body": {"stop_token_ids": [28, 30, 198]}},
    "short": {"max_tokens": 3},
    "one token": {"max_tokens": 1},
    "bias and min_p": {"temperature": 0.9, "seed": 2, "logit_bias": {"28": 4}, "extra_body": {"min_p": 0.1}},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.3, "extra_body": {"repetition_penalty": 1.1}},
    "bad words": {"extra_body": {"bad_words": [" the", " of", " is"]}},
    "several": {"n": 3, "temperature": 0.8, "seed": 5},
    "ids": {"extra_body": {"return_token_ids": True, "ignore_eos": True, "min_tokens": 10}},
    "stop and ids": {"stop": [" leaves", "the sky"], "extra_body": {"return_token_ids": True}},
    "every five": {"extra_body": {"stream_interval": 5}},
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 99_999_999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
QUESTION = [{"role": "user", "content": "Which city is the capital of France, and how many people live there?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    demo = prepare(cache_dir(), lambda message: None)
    folder = tmp_path_factory.mktemp("requests")
    file = folder / "adaptivespec.json"
    shape = {"depth": 4, "width": 3, "nodes": 8}
    file.write_text(
        json.dumps({"method": "adaptivespec", "model": str(demo.head), "tree": {"policy": "static", "shape": shape}})
    )
    options = ["--scheduling-policy", "priority", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    running = Server([*arguments(demo.model), "--speculative-config", str(file), *options], folder / "server.log")
    try:
        running.wait()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=180, max_retries=0)


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def completed(given: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 32, "temperature": 0, "logprobs": 2} | given


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_completions(client: OpenAI, model: str, name: str) -> None:
    """Chunks of several tokens add up to the answer that is not streamed, to the last count and reason."""
    given = completed(STREAMED[name])
    prompt = PROMPTS[2]
    whole = client.completions.create(model=model, prompt=prompt, **given)
    text, ids = [""] * len(whole.choices), [[] for _ in whole.choices]
    tokens: list[list[str]] = [[] for _ in whole.choices]
    logprobs: list[list[float]] = [[] for _ in whole.choices]
    reasons: dict[int, Any] = {}
    usage, most = None, 0
    for chunk in client.completions.create(
        model=model, prompt=prompt, stream=True, stream_options={"include_usage": True}, **given
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text[choice.index] += choice.text
            if choice.logprobs is not None:
                most = max(most, len(choice.logprobs.tokens))
                tokens[choice.index] += choice.logprobs.tokens
                logprobs[choice.index] += choice.logprobs.token_logprobs
            ids[choice.index] += (choice.model_extra or {}).get("token_ids") or []
            if choice.finish_reason is not None:
                reasons[choice.index] = (choice.finish_reason, (choice.model_extra or {}).get("stop_reason"))
    choices = sorted(whole.choices, key=lambda choice: choice.index)
    assert text == [choice.text for choice in choices]
    assert tokens == [choice.logprobs.tokens for choice in choices]
    assert logprobs == [pytest.approx(choice.logprobs.token_logprobs, abs=1e-4) for choice in choices]
    assert [reasons[i] for i in range(len(choices))] == [
        (choice.finish_reason, choice.model_extra.get("stop_reason")) for choice in choices
    ]
    assert usage == whole.usage
    assert whole.usage.completion_tokens == sum(len(part) for part in tokens)
    if given.get("extra_body", {}).get("return_token_ids"):
        assert ids == [choice.model_extra["token_ids"] for choice in choices]
        assert len(ids[0]) == whole.usage.completion_tokens
    if whole.usage.completion_tokens > 20:
        assert most > 1, "one token a chunk: nothing was tested"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_ends_text_ids_logprobs_and_usage_together(client: OpenAI, model: str, include: bool) -> None:
    """Stop strings of several tokens, which begin and end anywhere in what a step accepts."""
    prompt = PROMPTS[2]
    free = client.completions.create(model=model, prompt=prompt, **completed({})).choices[0].text
    for at in range(5, 60, 11):
        stop = free[at : at + 12]
        end = free.index(stop)
        extra = {"return_token_ids": True, "include_stop_str_in_output": include}
        answer = client.completions.create(
            model=model, prompt=prompt, **completed({"stop": [stop], "extra_body": extra})
        )
        (choice,) = answer.choices
        assert choice.text == (free[:end] + stop if include else free[:end])
        assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", stop)
        tokens = choice.logprobs.tokens
        assert stop in "".join(tokens) and stop not in "".join(tokens[:-1])
        assert len(tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs)
        assert len(tokens) == len(choice.model_extra["token_ids"]) == answer.usage.completion_tokens


@pytest.mark.parametrize("given", [{}, {"temperature": 0.8, "seed": 4, "n": 2}, {"stop": [" is"]}])
def test_streamed_chats(client: OpenAI, model: str, given: dict[str, Any]) -> None:
    asked = {"max_tokens": 40, "temperature": 0, "logprobs": True, "top_logprobs": 2} | given
    whole = client.chat.completions.create(model=model, messages=QUESTION, **asked)
    text = [""] * len(whole.choices)
    logprobs: list[list[tuple[str, float]]] = [[] for _ in whole.choices]
    usage, most = None, 0
    for chunk in client.chat.completions.create(
        model=model, messages=QUESTION, stream=True, stream_options={"include_usage": True}, **asked
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None and choice.logprobs.content:
                most = max(most, len(choice.logprobs.content))
                logprobs[choice.index] += [(entry.token, entry.logprob) for entry in choice.logprobs.content]
    for choice in whole.choices:
        assert text[choice.index] == choice.message.content
        streamed, answered = logprobs[choice.index], choice.logprobs.content
        assert [token for token, _ in streamed] == [entry.token for entry in answered]
        assert [value for _, value in streamed] == pytest.approx([entry.logprob for entry in answered], abs=1e-4)
    assert usage == whole.usage
    assert most > 1


def test_echo(client: OpenAI, model: str) -> None:
    """The prompt comes back in front, with log-probabilities of its own, streamed or not."""
    prompt = PROMPTS[0]
    alone = client.completions.create(model=model, prompt=prompt, **completed({}))
    echoed = client.completions.create(model=model, prompt=prompt, echo=True, **completed({}))
    assert echoed.choices[0].text == prompt + alone.choices[0].text
    assert echoed.usage == alone.usage
    own = len(alone.choices[0].logprobs.tokens)
    assert echoed.choices[0].logprobs.tokens[-own:] == alone.choices[0].logprobs.tokens
    assert len(echoed.choices[0].logprobs.tokens) == alone.usage.total_tokens
    streamed = client.completions.create(model=model, prompt=prompt, echo=True, stream=True, **completed({}))
    assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == echoed.choices[0].text
    only = client.completions.create(model=model, prompt=prompt, echo=True, max_tokens=0, temperature=0)
    assert only.choices[0].text == prompt


def test_beam_search(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=PROMPTS[0], max_tokens=8, n=2, temperature=0, extra_body={"use_beam_search": True}
    )
    assert len({choice.text for choice in answer.choices}) == 2


def test_priorities(client: OpenAI, model: str) -> None:
    answers = [
        client.completions.create(model=model, prompt=PROMPTS[0], extra_body={"priority": p}, **completed({}))
        for p in (0, -5, 7)
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_formats(client: OpenAI, model: str, stream: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    asked = {"model": model, "messages": QUESTION, "max_tokens": 200, "temperature": 0, "response_format": schema}
    if stream:
        parts = client.chat.completions.create(**asked, stream=True)
        text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    else:
        text = client.chat.completions.create(**asked).choices[0].message.content
    value = json.loads(text)
    assert value.keys() == SCHEMA["properties"].keys() and isinstance(value["people"], int)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_tool_calls(client: OpenAI, model: str, choice: Any) -> None:
    """The pieces of several tokens that a call is streamed in add up to its whole arguments."""
    asked = {
        "model": model,
        "messages": QUESTION,
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 300,
        "temperature": 0,
    }
    calls = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert calls and all(call.function.name == "look_up" for call in calls)
    whole = [json.loads(call.function.arguments) for call in calls]
    pieces: dict[int, str] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices:
            for call in part.delta.tool_calls or []:
                pieces[call.index] = pieces.get(call.index, "") + (call.function.arguments or "")
    assert [json.loads(pieces[i]) for i in sorted(pieces)] == whole


def test_overrides(client: OpenAI, server: Server, model: str) -> None:
    """The text does not depend on what is drafted; a request that asks for nothing drafts nothing."""

    def drafted() -> float:
        lines = server.get("/metrics").splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:spec_decode_num_draft_tokens_total"))

    def answer(**xargs: Any) -> Any:
        before = drafted()
        given = completed({"extra_body": {"vllm_xargs": xargs} if xargs else {}})
        answer = client.completions.create(model=model, prompt=PROMPTS[2], **given)
        return answer.choices[0].text, drafted() - before

    text, nodes = answer()
    assert nodes > 0
    assert answer(adaptivespec_max_nodes=0) == (text, 0)
    few, many = answer(adaptivespec_max_nodes=1), answer(adaptivespec_shape=[4, 3, 8])
    assert few[0] == many[0] == answer(adaptivespec_shape="2,2,4", adaptivespec_margin="off")[0] == text
    assert 0 < few[1] < many[1]


BAD: dict[str, dict[str, Any]] = {
    "adaptivespec_margin": {"vllm_xargs": {"adaptivespec_margin": 0.5}},
    "adaptivespec_max_nodes": {"vllm_xargs": {"adaptivespec_max_nodes": 9}},
    "adaptivespec_shape": {"vllm_xargs": {"adaptivespec_shape": "4,4"}},
    "adaptivespec_depth": {"vllm_xargs": {"adaptivespec_depth": 2}},
    "watermarking": {"watermarking": True},
    "routed_experts_prompt_start": {"routed_experts_prompt_start": 2},
    "thinking_token_budget": {"thinking_token_budget": 5},
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_gets_400_by_name(client: OpenAI, model: str, name: str) -> None:
    with pytest.raises(BadRequestError, match=name):
        client.completions.create(model=model, prompt=PROMPTS[0], extra_body=BAD[name], **completed({}))
    with pytest.raises(BadRequestError, match=name):
        client.chat.completions.create(model=model, messages=QUESTION, max_tokens=3, extra_body=BAD[name])


def test_the_server_is_well_after_all(server: Server) -> None:
    """Runs last: nothing above left a stack trace or a grammar's complaint in the log."""
    log = server.log.read_text()
    for complaint in ("Traceback", "Failed to advance", "Unexpected: grammar", "LLMatcher error"):
        assert complaint not in log, log[log.index(complaint) - 2000 :][:4000]
