"""The rows of an input file: OpenAI's batch format, or a request and nothing else; checked before anything starts."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from adaptivespec_vllm.config import ConfigError, reason, shown

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
REQUESTS: dict[str, type[BaseModel]] = {CHAT: ChatCompletionRequest, COMPLETION: CompletionRequest}
"""What a row may ask for, by its ``url``, and vLLM's own schema of the body."""

_ENVELOPE = {"custom_id", "method", "url", "body"}
_MOST_FAULTS = 10


@dataclass(frozen=True)
class Row:
    """One request.

    Attributes:
        line: of the input file, from 1.
        custom_id: what the answer is called by.
        url: one of :data:`REQUESTS`.
        body: as vLLM takes it.

    """

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


def read(path: Path, model: str) -> list[Row]:
    """All rows of a file, for a model that requests may call ``model``.

    Raises:
        ConfigError: naming the lines (of the first ten faults) and what is wrong with each.

    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({why})") from None
    rows, faults = [], []
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            rows.append(_row(line, text, model))
        except ConfigError as error:
            faults.append(f"{path}:{line}: {error}")
    faults += [f"{path}:{fault}" for fault in _repeated(rows)]
    if faults:
        more = [f"and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
        raise ConfigError("\n".join([*faults[:_MOST_FAULTS], *more]))
    if not rows:
        raise ConfigError(f"{path}: no rows; allowed: JSON lines with a prompt or messages")
    return rows


def _row(line: int, text: str, model: str) -> Row:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not JSON ({error})") from None
    if not isinstance(given, dict):
        raise ConfigError(f"got {shown(given)}; allowed: an object")
    custom_id = given.get("custom_id", f"line-{line}")
    if not isinstance(custom_id, str) or not custom_id:
        raise ConfigError(f"custom_id: got {shown(custom_id)}; allowed: a string that is not empty")
    url, body = _enveloped(given) if {"body", "url"} & given.keys() else _bare(given)
    return Row(line, custom_id, url, _checked(url, body, model))


def _enveloped(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """OpenAI's batch format."""
    unknown = sorted(given.keys() - _ENVELOPE)
    if unknown:
        raise ConfigError(f"{unknown[0]}: unknown key; allowed: {', '.join(sorted(_ENVELOPE))}")
    if given.get("method", "POST") != "POST":
        raise ConfigError(f"method: got {shown(given['method'])}; allowed: 'POST'")
    url, body = given.get("url"), given.get("body")
    if url not in REQUESTS:
        raise ConfigError(f"url: got {shown(url)}; allowed: {' or '.join(REQUESTS)}")
    if not isinstance(body, dict):
        raise ConfigError(f"body: got {shown(body)}; allowed: an object")
    return url, body


def _bare(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A request by itself; its kind follows from what it holds."""
    kinds = [url for key, url in (("messages", CHAT), ("prompt", COMPLETION)) if key in given]
    if len(kinds) != 1:
        raise ConfigError(f"{'prompt and messages given' if kinds else 'no prompt or messages'}; allowed: one of them")
    return kinds[0], {key: value for key, value in given.items() if key != "custom_id"}


def _checked(url: str, body: dict[str, Any], model: str) -> dict[str, Any]:
    schema = REQUESTS[url]
    known = schema.model_fields.keys() | {field.alias for field in schema.model_fields.values() if field.alias}
    for key in body:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(f"{key}: unknown parameter of {url}{f'; did you mean {near[0]!r}?' if near else ''}")
    if body.get("stream"):
        raise ConfigError("stream: got true; allowed: false, since answers are written when they are whole")
    if body.get("model", model) != model:
        raise ConfigError(f"model: got {shown(body['model'])}; allowed: {model!r}, or leave it out")
    body = {**body, "model": model}
    try:
        schema.model_validate(body)
    except ValidationError as error:
        raise ConfigError(reason(error)) from None
    except ValueError as error:  # vLLM's own, raised while it validates
        raise ConfigError(str(error)) from None
    return body


def _repeated(rows: Iterable[Row]) -> Iterator[str]:
    first: dict[str, int] = {}
    for row in rows:
        line = first.setdefault(row.custom_id, row.line)
        if line != row.line:
            yield f"{row.line}: custom_id: {shown(row.custom_id)} is that of line {line}; allowed: ids that differ"
