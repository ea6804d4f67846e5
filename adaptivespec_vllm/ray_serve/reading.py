"""From a file or a mapping to a checked :class:`AppConfig`; every fault is one line that says where it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from adaptivespec_vllm.config import ConfigError, shown
from adaptivespec_vllm.config import read as read_method
from adaptivespec_vllm.ray_serve.schema import AppConfig

_MOST_FAULTS = 5
"""Faults that one error names."""


def read(path: Path) -> AppConfig:
    """The application of a YAML file; relative paths in it are beside the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    try:
        options = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    try:
        return parse(options, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def of_arguments(arguments: Mapping[str, Any]) -> AppConfig:
    """The application of what Ray's own command line or configuration file passes."""
    if "config" not in arguments:
        return parse(dict(arguments), Path.cwd())
    if len(arguments) > 1:
        more = ", ".join(sorted(set(arguments) - {"config"}))
        raise ConfigError(f"{more}: given beside config; allowed: config=PATH alone, or the keys of such a file")
    return read(Path(str(arguments["config"])))


def parse(options: Any, folder: Path) -> AppConfig:
    """The application of a mapping; files that it names are read, so that no other node needs them."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"got {shown(options)}; allowed: an object with the keys {', '.join(AppConfig.model_fields)}")
    try:
        config = AppConfig.model_validate(options)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        more = [f"and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
        raise ConfigError("; ".join([*map(_in_words, faults[:_MOST_FAULTS]), *more])) from None
    from adaptivespec_vllm.engine import spec_config

    models = []
    for index, model in enumerate(config.models):
        method = model.adaptivespec
        try:
            if isinstance(method, str):
                method = read_method(folder / Path(method).expanduser())
            if method is not None:
                spec_config.parse(method)
        except ConfigError as error:
            raise ConfigError(f"models[{index}].adaptivespec: {error}") from None
        models.append(model.model_copy(update={"adaptivespec": method}))
    return config.model_copy(update={"models": models})


def _in_words(fault: Any) -> str:
    where = ""
    for part in fault["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown key"
    if fault["type"] == "missing":
        return f"{where}: missing"
    return f"{where}: got {shown(fault['input'])}; {fault['msg']}"


class _UniqueKeys(yaml.SafeLoader):
    """YAML without keys given twice, of which the first would be lost in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
