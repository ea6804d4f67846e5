"""Faults and keys in words: one line for an error, one row a key for the documentation."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from adaptivespec_vllm.config.base import ConfigError
from adaptivespec_vllm.config.lossy import RuleConfig, rule_keys
from adaptivespec_vllm.config.schema import AdaptiveSpecConfig
from adaptivespec_vllm.config.tree import ShapeConfig, TreeConfig, tree_keys
from adaptivespec_vllm.registry import POLICIES, RULES, Registry

MAX_SHOWN = 60
"""Characters of a key or a value that a message repeats."""


def key_error(key: str, allowed: Collection[str], path: str = "") -> ConfigError:
    """The error of a key that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(key, allowed, n=1) if len(key) <= MAX_SHOWN else []
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"{path}{shown_key(key)}: unknown key; {hint}allowed: {', '.join(sorted(allowed))}")


def shown_key(key: str) -> str:
    """A key as a message repeats it: readable when it is empty, on one line, not too long."""
    return shortened(key if key and key.isprintable() else json.dumps(key))


def shortened(text: str, limit: int = MAX_SHOWN) -> str:
    """``text``, or its beginning where it is longer than ``limit``; what cannot be printed is escaped."""
    if len(text) > limit:
        text = f"{text[: MAX_SHOWN - 3]}..."
    return text if text.isprintable() else ascii(text)[1:-1]


def reason(error: BaseException) -> str:
    """Why something of another package failed: a line without a traceback."""
    if isinstance(error, ValidationError):
        return shortened_reason("; ".join(_own_words(fault) for fault in error.errors(include_url=False)))
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith("Traceback"))
    return shortened_reason(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def shortened_reason(text: str, limit: int = 300) -> str:
    """A foreign message on one line, cut at ``limit``."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _own_words(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{where}: {message}" if where else message


def explain(error: ValidationError, options: Mapping[str, Any]) -> str:
    """The first fault of ``options`` as one line: key path, what was given, what is allowed."""
    fault = error.errors(include_url=False)[0]
    own = fault.get("ctx", {}).get("error")
    if isinstance(own, ConfigError):
        return str(own)
    *parents, key = [str(part) for part in fault["loc"]]
    path = "".join(f"{part}." for part in parents)
    section = _section_at(parents, options)
    if fault["type"] == "extra_forbidden":
        return str(key_error(key, section.model_fields, path))
    allowed = _allowed(section.model_fields[key])
    if fault["type"] == "missing":
        return f"{path}{key}: missing; allowed: {allowed}"
    return f"{path}{key}: got {shown(fault['input'])}; allowed: {allowed}"


def shown(value: Any) -> str:
    """A value as a message repeats it."""
    for write in (json.dumps, repr):
        try:
            return shortened(write(value))
        except (TypeError, ValueError, RecursionError):  # no JSON, an integer of thousands of digits, a deep list
            continue
    return f"a value of type {type(value).__name__}"


def _section_at(parents: list[str], options: Mapping[str, Any]) -> type[BaseModel]:
    section: type[BaseModel] = AdaptiveSpecConfig
    for part in parents:
        nested = _chosen(part, options) if section is AdaptiveSpecConfig else _section(section.model_fields[part])
        assert nested is not None
        section = nested
    return section


def _chosen(name: str, options: Mapping[str, Any]) -> type[BaseModel] | None:
    """A section of the configuration; that of a rule or a policy has keys of its own."""
    given = options.get(name)
    if isinstance(given, Mapping) and name == "rule":
        return rule_keys(given.get("name"))
    if isinstance(given, Mapping) and name == "tree" and "policy" in given:
        return tree_keys(given["policy"])
    return _section(AdaptiveSpecConfig.model_fields[name])


def _section(field: FieldInfo) -> type[BaseModel] | None:
    for kind in _kinds(field):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _kinds(field: FieldInfo) -> list[Any]:
    annotation = field.annotation
    kinds = list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else [annotation]
    return [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]


def _allowed(field: FieldInfo) -> str:
    for mark in field.metadata:
        if isinstance(mark, Registry):
            return " or ".join(f"'{name}'" for name in mark)
    if isinstance(field.json_schema_extra, dict) and "allowed" in field.json_schema_extra:
        return str(field.json_schema_extra["allowed"])
    kinds = _kinds(field)
    texts = [_allowed_kind(kind, field) for kind in kinds if kind is not NoneType]
    return " or ".join(texts + ["null"] * (NoneType in kinds))


def _allowed_kind(kind: Any, field: FieldInfo) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f"'{choice}'" for choice in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"an object with the keys {', '.join(kind.model_fields)}"
    if kind is str:
        return "a string that is not empty"
    if kind is bool:
        return "true or false"
    return {int: "an integer", float: "a number"}[kind] + _bounds(field)


def _bounds(field: FieldInfo) -> str:
    bound = {
        name: getattr(mark, name)
        for mark in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if getattr(mark, name, None) is not None
    }
    if {"ge", "le"} <= bound.keys():
        return f" from {bound['ge']} to {bound['le']}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " " + " and ".join(f"{words[name]} {bound[name]}" for name in words if name in bound) if bound else ""


class KeyDoc(NamedTuple):
    """One key, for the documentation."""

    key: str
    allowed: str
    default: str
    meaning: str


def describe(model: type[BaseModel] = AdaptiveSpecConfig, path: str = "") -> Iterator[KeyDoc]:
    """Every key in order of appearance, sections before their keys."""
    for name, field in model.model_fields.items():
        key = f"{path}{name}"
        yield KeyDoc(key, _allowed(field), _default(key, field), field.description or "")
        section = _section(field)
        if section is ShapeConfig and name != "low":
            continue  # the same three keys as under ``low``
        if section is not None:
            yield from describe(section, f"{key}.")
        if section is TreeConfig:
            yield from _own(key, TreeConfig, {name: tree_keys(name) for name in POLICIES})
        if section is RuleConfig:
            yield from _own(key, RuleConfig, {name: rule_keys(name) for name in RULES})


def _own(path: str, base: type[BaseModel], named: Mapping[str, type[BaseModel]]) -> Iterator[KeyDoc]:
    """The keys that only some of the rules or policies know."""
    for owner, section in named.items():
        for name, field in section.model_fields.items():
            if name not in base.model_fields:
                key = f"{path}.{name}"
                yield KeyDoc(key, _allowed(field), _default(key, field), f"Of `{owner}`: {field.description}")


def markdown_table() -> str:
    """The key table of ``docs/configuration.md``."""
    lines = ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    for doc in describe():
        key = doc.key.replace("tree.low.", "tree.{low,high,shape}.")
        lines.append(f"| `{key}` | {doc.allowed} | {doc.default} | {doc.meaning} |")
    return "\n".join(lines) + "\n"


def _default(key: str, field: FieldInfo) -> str:
    special = {
        "tree.policy": "`cost-aware`; preset `paper`, or with a key that only `adaptive` knows: `adaptive`",
        "tree.low": "(3, 4, 3)",
        "tree.high": "(7, 1, 7)",
        "tree.shape": "(8, 4, 24); `talon`, `ddd`: (7, 10, 60)",
        "tree.scope": "`request`; preset `paper`: `batch`",
        "tree.min_path_probability": "0.05; `static` or preset `paper`: 0",
        "method": "required",
        "model": "required",
        "num_speculative_tokens": "the largest `nodes`",
    }
    if key in special:
        return special[key]
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "see its keys"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return "null" if field.default is None else f"`{field.default}`"
