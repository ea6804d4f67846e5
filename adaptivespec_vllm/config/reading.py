"""From a path, JSON text or a mapping to a configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from adaptivespec_vllm.config.base import METHOD, ConfigError
from adaptivespec_vllm.config.explain import explain, key_error, shortened, shown, shown_key
from adaptivespec_vllm.config.schema import AdaptiveSpecConfig

MAX_SHOWN_PATH = 240
"""Characters of a path that is repeated in full; a longer one is not a path that anybody can use."""


class Loaded(NamedTuple):
    """A configuration, and the keys beside it that belong to vLLM."""

    config: AdaptiveSpecConfig
    vllm: dict[str, Any]


def load(
    source: str | Path | Mapping[str, Any], foreign: Collection[str] = (), refused: Collection[str] = ()
) -> Loaded:
    """Read and resolve a configuration from a path, JSON text or a mapping.

    Args:
        source: where it is. A string that starts with ``{`` is JSON text, any other string a path.
        foreign: keys that are not ours but allowed beside ours; they come back untouched.
        refused: keys that come back as well, for the caller to refuse by name, and are not suggested.

    Raises:
        ConfigError: for whatever is wrong with it.

    """
    origin = "" if isinstance(source, Mapping) or is_json_text(source) else f"{_shown_path(source)}: "
    options = read(source)
    try:
        config, vllm = _split(options, foreign, refused)
        if "method" not in options:
            raise ConfigError(f"method: missing; allowed: {METHOD!r}")
        if config.model is None:
            raise ConfigError("model: missing; give the directory or hub id of an EAGLE-3 head")
    except ConfigError as error:
        raise ConfigError(f"{origin}{error}") from None
    return Loaded(config, vllm)


def resolve(options: Mapping[str, Any]) -> AdaptiveSpecConfig:
    """The configuration of a mapping that holds our keys only; ``method`` and ``model`` may be absent."""
    options = _underscored(options)
    try:
        config = AdaptiveSpecConfig.model_validate(options)
    except ValidationError as error:
        raise ConfigError(explain(error, options)) from None
    model, costs = (path and _home(path) for path in (config.model, config.tree.costs))
    tree = config.tree.model_copy(update={"costs": costs})
    return config.model_copy(update={"num_speculative_tokens": config.max_nodes, "model": model, "tree": tree})


def read(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The raw mapping of a path, of JSON text or of a mapping, with ``-`` in keys turned into ``_``.

    Raises:
        ConfigError: missing file, invalid JSON (with line and column), a key twice, not an object.

    """
    if isinstance(source, Mapping):
        return _underscored(source)
    if is_json_text(source):
        return _parse(str(source), "JSON text")
    if not str(source).strip():
        raise ConfigError(f"got {shown(str(source))}; allowed: the path of a file, or a JSON object")
    name, path = _shown_path(source), Path(_home(str(source)))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else reason
        raise ConfigError(f"{name}: cannot be read ({reason})") from None
    return _parse(text, name)


def _home(path: str) -> str:
    """``~`` at the start is the home directory, as a shell would have it."""
    return os.path.expanduser(path)


def _shown_path(source: str | Path) -> str:
    return shortened(str(source), MAX_SHOWN_PATH)


def is_json_text(source: str | Path) -> bool:
    """Whether a string is meant as JSON and not as a path."""
    return isinstance(source, str) and source.lstrip().startswith(("{", "["))


class _Repeated(dict[str, Any]):
    """An object of a JSON text that holds ``key`` more than once."""

    def __init__(self, values: dict[str, Any], key: str) -> None:
        super().__init__(values)
        self.key = key


def _path_of_repeated(parsed: Any) -> str | None:
    """The path of the first key given twice; None where a later value took the place of the object around it."""
    waiting: list[tuple[Any, tuple[str, ...]]] = [(parsed, ())]
    while waiting:
        value, path = waiting.pop()
        if isinstance(value, _Repeated):
            return ".".join(shown_key(key) for key in (*path, value.key))
        if isinstance(value, (dict, list)):
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += reversed([(inner, (*path, str(key))) for key, inner in inside])
    return None


def _parse(text: str, origin: str) -> dict[str, Any]:
    repeated: list[_Repeated] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) == len(pairs):
            return result
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                repeated.append(_Repeated(result, key))
                break
            seen.add(key)
        return repeated[-1]

    def constant(name: str) -> Any:
        raise ConfigError(f"{origin}: {name} is not valid JSON")

    try:
        parsed = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin}: invalid JSON at line {error.lineno} column {error.colno}: {error.msg}") from None
    except ConfigError:
        raise
    except ValueError:  # Python's limit on the digits of an integer
        raise ConfigError(f"{origin}: holds an integer of too many digits") from None
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply") from None
    if repeated:
        raise ConfigError(f"{origin}: {_path_of_repeated(parsed) or shown_key(repeated[0].key)}: given twice")
    if not isinstance(parsed, dict):
        raise ConfigError(f"{origin}: got {shown(parsed)}; allowed: a JSON object")
    try:
        return _underscored(parsed)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _underscored(options: Mapping[Any, Any]) -> dict[str, Any]:
    """Keys with ``_`` for ``-``, at every level, as vLLM's own command line writes them."""
    try:
        return _renamed(options, "")
    except RecursionError:
        raise ConfigError("nested too deeply") from None


def _renamed(options: Mapping[Any, Any], path: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for raw, value in options.items():
        key = str(raw).replace("-", "_")
        if key in result:
            raise ConfigError(f"{path}{shown_key(key)}: given twice")
        result[key] = _renamed(value, f"{path}{shown_key(key)}.") if isinstance(value, Mapping) else value
    return result


def _split(
    options: Mapping[str, Any], foreign: Collection[str], refused: Collection[str]
) -> tuple[AdaptiveSpecConfig, dict[str, Any]]:
    own = AdaptiveSpecConfig.model_fields
    for key in options:
        if key not in own and key not in foreign and key not in refused:
            raise key_error(key, {*own, *foreign})
    config = resolve({key: value for key, value in options.items() if key in own})
    return config, {key: value for key, value in options.items() if key not in own}
