"""What our replacements in vLLM's front end do; each calls the original and changes nothing unless asked."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adaptivespec_vllm.config import METHOD, ConfigError, is_json_text, read, shortened, shown
from adaptivespec_vllm.engine import seams

_ALIASES = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
_REQUEST = "_adaptivespec_request"
REFUSED_PARAMETERS = {
    "watermarking": ((None, False), "tokens of a tree are verified as they are, without a watermark"),
    "routed_experts_prompt_start": ((None, 0), "routed experts are not returned with method 'adaptivespec'"),
}
"""Parameters of a request that would have no effect: values that ask for nothing, and why others are refused."""


class _Request(dict[str, Any]):
    """What was asked for, on its way through vLLM; the key that it has is ours only with this type."""


def add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    """``--speculative-config`` takes a path too, and ``--spec-method`` knows our name."""
    parser = original(parser)
    actions = {option: action for action in parser._actions for option in action.option_strings}
    actions["--speculative-config"].type = _taking_paths(actions["--speculative-config"].type)
    method = actions.get("--spec-method")
    if method is not None and method.choices is not None and METHOD not in method.choices:
        method.choices = [*method.choices, METHOD]
    return parser


def create_engine_config(original: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """A path or JSON text becomes a dict; our refusals come before workers start."""
    engine_args.speculative_config = _as_mapping(engine_args.speculative_config)
    request = requested(engine_args)
    if request is None:
        return original(engine_args, *args, **kwargs)
    seams.require("front")
    from adaptivespec_vllm.engine import refusals, spec_config

    refusals.check_engine_args(engine_args)
    engine_args.speculative_config = {**(engine_args.speculative_config or {}), _REQUEST: _Request(request)}
    try:
        vllm_config = original(engine_args, *args, **kwargs)
    finally:
        engine_args.speculative_config.pop(_REQUEST, None)
    refusals.check(vllm_config)
    spec_config.choose_scheduler(vllm_config.scheduler_config)
    refusals.check_target_class(vllm_config.model_config)
    return vllm_config


def create_speculative_config(
    original: Callable[..., Any], engine_args: Any, target_model_config: Any, target_parallel_config: Any
) -> Any:
    """Our configuration for our method, vLLM's own for every other."""
    request = requested(engine_args)
    if request is None:
        return original(engine_args, target_model_config, target_parallel_config)
    from adaptivespec_vllm.engine import spec_config

    return spec_config.build(request, target_model_config, target_parallel_config)


def v2_unsupported_features(original: Callable[..., Any], vllm_config: Any) -> Any:
    """With our method vLLM takes the V1 runner, unless it was told to take V2."""
    unsupported = original(vllm_config)
    if getattr(vllm_config.speculative_config, METHOD, None) is not None:
        from adaptivespec_vllm.engine import spec_config

        if spec_config.runner() == "V1":
            unsupported = [*unsupported, f"speculative method '{METHOD}'"]
    return unsupported


def validate_spec_decode(original: Callable[..., Any], params: Any, speculative_config: Any) -> Any:
    """Our keys of a request are checked; parameters that trees honour are not refused."""
    settings = getattr(speculative_config, METHOD, None)
    if settings is None:
        return original(params, speculative_config)
    from vllm.exceptions import VLLMValidationError

    from adaptivespec_vllm.engine.overrides import overrides_of

    for name, (neutral, why) in REFUSED_PARAMETERS.items():
        value = getattr(params, name, None)
        if value not in neutral:
            raise VLLMValidationError(f"{name}: got {shown(value)}; not supported: {why}", parameter=name)
    try:
        overrides_of(params.extra_args, settings)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="extra_args") from None
    # Whatever else vLLM refuses with speculation stays refused.
    rest = copy.copy(params)
    rest.min_p, rest.logit_bias = 0.0, None
    return original(rest, speculative_config)


def requested(engine_args: Any) -> dict[str, Any] | None:
    """The speculative configuration when it asks for our method, flags of vLLM folded in; otherwise None."""
    options = engine_args.speculative_config
    options = dict(options or {})
    if isinstance(options.get(_REQUEST), _Request):
        # vLLM replaces method and model when the model it was given is itself a speculators checkpoint
        return {**options[_REQUEST], "model": options.get("model", options[_REQUEST].get("model"))}
    flags = {key: getattr(engine_args, flag, None) for flag, key in _ALIASES.items()}
    if METHOD not in (options.get("method"), flags["method"]):
        return None
    for flag, key in _ALIASES.items():
        if flags[key] is not None and key in options:
            raise ConfigError(f"{key}: given in speculative_config and by --{flag.replace('_', '-')}; allowed: one")
    return options | {key: value for key, value in flags.items() if value is not None}


def _as_mapping(options: Any) -> Any:
    """A path or JSON text read; whatever else cannot hold a method is one error instead of a raw one of vLLM's."""
    if isinstance(options, (str, Path)) and str(options).strip():
        return read(options)
    if options is None or isinstance(options, dict):
        return options
    if isinstance(options, Mapping):
        return dict(options)
    raise ConfigError(
        f"speculative_config: got {shown(options)}; allowed: an object (dict), its JSON text, or the path of a file"
    )


def _taking_paths(parse_json: Callable[[str], Any]) -> Callable[[str], Any]:
    def speculative_config(text: str) -> Any:
        try:
            options = read(text) if _is_path(text) else parse_json(text)
            if isinstance(options, dict) and options.get("method") == METHOD:
                _check_keys(options, text)
            return options
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except argparse.ArgumentTypeError:
            if METHOD in text:
                _explain(text)
            raise

    return speculative_config


def _check_keys(options: dict[str, Any], text: str) -> None:
    """Our error as one of the command line's, before anything is loaded; head and target are checked later."""
    from adaptivespec_vllm.engine import spec_config

    try:
        spec_config.parse({"model": "given by a flag of its own"} | options)
    except ConfigError as error:
        raise ConfigError(f"{shortened(text, 240)}: {error}" if _is_path(text) else str(error)) from None


def _explain(text: str) -> None:
    """Raise our own error, with line and column, for JSON text that was meant for us."""
    try:
        read(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _is_path(text: str) -> bool:
    if not text.strip() or is_json_text(text):
        return False
    if text.endswith(".json") or "/" in text:
        return True
    try:
        return Path(text).is_file()
    except OSError:  # too long for a path
        return False
