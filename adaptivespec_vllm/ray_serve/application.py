"""From our configuration to Ray's: an ``LLMConfig`` a model, and Ray's own OpenAI application over all of them."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from typing import Any

from ray.serve._private.config import DeploymentConfig
from ray.serve.llm import LLMConfig, build_openai_app
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.platforms import current_platform

from adaptivespec_vllm.config import ConfigError, reason, shown
from adaptivespec_vllm.ray_serve.schema import AppConfig, ModelConfig

PREFIX_ROUTER = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
IMBALANCE = 16
"""Requests that a replica may have more than another and still get one whose prefix it holds."""

STARTS = 3
"""Times that Ray starts a replica whose engine does not come up; Ray's own 20 would hide the error for long."""

_OURS = {
    "model": "the key is models[].model",
    "model_tag": "the key is models[].model",
    "served_model_name": "the key is models[].name",
    "speculative_config": "the key is models[].adaptivespec",
    "distributed_executor_backend": "Ray Serve chooses it: 'mp' on CPUs, 'ray' elsewhere",
}
_SWITCHES = "VLLM_ADAPTIVESPEC_"


def build(config: AppConfig) -> Any:
    """Ray's application of a whole configuration. Ray starts a cluster for it unless one is connected."""
    return build_openai_app({"llm_configs": llm_configs(config)})


def llm_configs(config: AppConfig) -> list[LLMConfig]:
    """Ray's configuration of every model; nothing is started.

    Raises:
        ConfigError: for what Ray or vLLM would not take.

    """
    names = [model.name for model in config.models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"models[].name: {', '.join(map(repr, twice))} given twice; allowed: names that differ")
    return [_llm_config(config, index) for index in range(len(names))]


def _llm_config(config: AppConfig, index: int) -> LLMConfig:
    model, where = config.models[index], f"models[{index}]"
    _check_names(f"{where}.engine", model.engine, _engine_arguments(), _OURS)
    _check_names(f"{where}.deployment", model.deployment, {*DeploymentConfig.model_fields, "ray_actor_options"}, {})
    engine: dict[str, Any] = dict(model.engine)
    if model.adaptivespec is not None:
        engine["speculative_config"] = dict(model.adaptivespec)  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "model_loading_config": {"model_id": model.name, "model_source": model.model},
        "engine_kwargs": engine,
        "deployment_config": _deployment(model, where),
        "placement_group_config": model.placement or _placement(),
        "accelerator_type": model.accelerator_type,
        "lora_config": model.lora,
        "runtime_env": {"env_vars": environment() | model.environment},
        "log_engine_metrics": config.metrics,
    }
    try:
        return LLMConfig(**options)
    except Exception as error:  # Ray wraps its validation errors in others
        raise ConfigError(f"{where}: {reason(error)}{_cause(error)}") from None


def environment() -> dict[str, str]:
    """Our switches of this process, for those of other nodes; vLLM passes them on to its workers by their prefix."""
    return {name: value for name, value in os.environ.items() if name.startswith(_SWITCHES)}


def _deployment(model: ModelConfig, where: str) -> dict[str, Any]:
    options = {"max_constructor_retry_count": STARTS, **model.deployment}
    if "request_router_config" in options:
        if "routing" in model.model_fields_set:
            raise ConfigError(f"{where}: routing and deployment.request_router_config; allowed: one of them")
        return options
    if model.routing == "prefix":
        kwargs = {"imbalanced_threshold": IMBALANCE, "do_eviction": True}
        options["request_router_config"] = {"request_router_class": PREFIX_ROUTER, "request_router_kwargs": kwargs}
    return options


def _placement() -> dict[str, Any] | None:
    """A CPU a rank where vLLM runs on CPUs; elsewhere Ray's default, a GPU a rank."""
    return {"bundle_per_worker": {"CPU": 1}} if current_platform.is_cpu() else None


def _engine_arguments() -> set[str]:
    arguments_of_servers = sys.modules[make_arg_parser.__module__].FrontendArgs  # the module has moved in 0.33
    return {field.name for kind in (AsyncEngineArgs, arguments_of_servers) for field in dataclasses.fields(kind)}


def _check_names(where: str, given: dict[str, Any], known: set[str], refused: dict[str, str]) -> None:
    for name in given:
        if name in refused:
            raise ConfigError(f"{where}.{name}: got {shown(given[name])}; not allowed here: {refused[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}.{name}: unknown key{hint}")


def _cause(error: BaseException) -> str:
    """What a validation error of Ray's was raised from, which it does not repeat."""
    causes = [fault.get("ctx", {}).get("error") for fault in getattr(error, "errors", list)()]
    inner = [cause.__cause__ for cause in causes if cause is not None and cause.__cause__ is not None]
    return f" ({reason(inner[0])})" if inner else ""
