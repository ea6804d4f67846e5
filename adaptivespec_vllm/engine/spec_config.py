"""Our settings as a vLLM speculative configuration.

To the rest of vLLM it is an ``eagle3`` configuration whose ``num_speculative_tokens`` is the cap on draft nodes; the
settings travel with it to every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SkipValidation, TypeAdapter, ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config as vllm_config_class
from vllm.config.utils import is_init_field
from vllm.platforms import current_platform

from adaptivespec_vllm.config import AdaptiveSpecConfig, ConfigError, load
from adaptivespec_vllm.engine import head

WORKERS = {"cpu": "adaptivespec_vllm.engine.v1.worker.AdaptiveSpecCPUWorker"}
"""Worker class of each supported platform."""

_INTERNAL = {"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"}

_REFUSED = {
    "num_speculative_tokens_per_batch_size": "the tree policy chooses how much is drafted",
    "parallel_drafting": "a tree is drafted level by level",
    "use_heterogeneous_vocab": "an EAGLE-3 head shares the target's vocabulary",
    "draft_sample_method": "trees are drafted greedily",
    "rejection_sample_method": "trees are verified by this method's own walk",
    "use_local_argmax_reduction": "a tree needs the draft's probabilities",
    "enable_adaptive_verification": "the tree policy chooses how much is verified",
    "index_share_for_mtp_iteration": "it belongs to method 'mtp'",
    "dspark_draft_topk": "it belongs to method 'dspark'",
    "tensor_parallel_size": "the key is draft_tensor_parallel_size",
}
_REFUSED_PREFIXES = {
    "prompt_lookup_": "it belongs to method 'ngram'",
    "suffix_decoding_": "it belongs to method 'suffix'",
    "synthetic_": "it belongs to rejection_sample_method 'synthetic'",
}
_FORCED = {"disable_padded_drafter_batch": (True, "requests draft different numbers of tokens")}


@vllm_config_class
class AdaptiveSpecSpeculativeConfig(SpeculativeConfig):
    """vLLM's speculative configuration with ours inside."""

    adaptivespec: SkipValidation[AdaptiveSpecConfig] = Field(default=None)  # type: ignore[assignment]
    """Settings of the method; always set when built by :func:`build`."""

    def compute_hash(self) -> str:
        """vLLM's hash with every setting of ours but the head's name, which vLLM's own part covers."""
        settings = self.adaptivespec.model_dump_json(exclude={"model"}) if self.adaptivespec else ""
        factors = f"{SpeculativeConfig.compute_hash(self)} {self.num_speculative_tokens} {settings}"
        return hashlib.sha256(factors.encode()).hexdigest()

    def __repr__(self) -> str:
        return (
            f"SpeculativeConfig(method='adaptivespec', model={self.model!r}, "
            f"num_spec_tokens={self.num_speculative_tokens!r}, adaptivespec={self.adaptivespec!r})"
        )


def foreign_keys() -> tuple[frozenset[str], frozenset[str]]:
    """Keys of vLLM's own speculative configuration: those that may be written beside ours, those that may not."""
    names = {name for name in SpeculativeConfig.__dataclass_fields__ if is_init_field(SpeculativeConfig, name)}
    names -= _INTERNAL | AdaptiveSpecConfig.model_fields.keys()
    refused = frozenset(name for name in names if _why_refused(name))
    return frozenset(names - refused), refused


def parse(source: Mapping[str, Any] | str | Path) -> tuple[AdaptiveSpecConfig, dict[str, Any]]:
    """Our settings and the checked keys of vLLM beside them.

    Raises:
        ConfigError: for whatever is wrong with either.

    """
    settings, vllm_keys = load(source, *foreign_keys())
    for key, value in vllm_keys.items():
        _check_foreign(key, value)
    return settings, vllm_keys


def build(options: Mapping[str, Any], target_model: Any, target_parallel: Any) -> AdaptiveSpecSpeculativeConfig:
    """The configuration for a target, after everything that can be checked before weights are loaded.

    Also asks for our worker, by vLLM's own option ``worker_cls``.

    Args:
        options: the speculative configuration as the user gave it.
        target_model: vLLM's ``ModelConfig`` of the target.
        target_parallel: vLLM's ``ParallelConfig`` of the target; its ``worker_cls`` is set.

    """
    settings, vllm_keys = parse(options)
    worker = _worker(target_parallel.worker_cls)
    head.check(str(settings.model), head.TargetFacts.of_model_config(target_model))
    vllm_keys |= {key: value for key, (value, _) in _FORCED.items()}
    try:
        config = AdaptiveSpecSpeculativeConfig(
            **vllm_keys,
            method="eagle3",
            model=settings.model,
            num_speculative_tokens=settings.max_nodes,
            target_model_config=target_model,
            target_parallel_config=target_parallel,
            adaptivespec=settings,
        )
    except ValidationError as error:
        raise ConfigError(f"speculative_config: {_first_line(error)}") from error
    target_parallel.worker_cls = worker
    return config


def _check_foreign(key: str, value: Any) -> None:
    field = SpeculativeConfig.__pydantic_fields__[key]  # type: ignore[attr-defined]
    reason = _why_refused(key)
    if reason is not None and value != field.get_default():
        raise ConfigError(f"{key}: got {value!r}; not allowed with method 'adaptivespec': {reason}")
    if key in _FORCED and value != _FORCED[key][0]:
        wanted, reason = _FORCED[key]
        raise ConfigError(f"{key}: got {value!r}; allowed: {wanted!r}, because {reason}")
    if key == "attention_backend" or value is None:
        return  # vLLM turns its name into a member of its enumeration
    try:
        TypeAdapter(Annotated[field.annotation, Field(), *field.metadata]).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{key}: got {value!r}; {_first_line(error)}") from None


def _why_refused(key: str) -> str | None:
    by_prefix = (why for prefix, why in _REFUSED_PREFIXES.items() if key.startswith(prefix))
    return _REFUSED.get(key) or next(by_prefix, None)


def _first_line(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    return str(fault["msg"]).removeprefix("Value error, ")


def _worker(chosen: Any) -> str:
    platform = str(current_platform.device_type)
    if platform not in WORKERS:
        raise ConfigError(
            f"method: 'adaptivespec' is not supported yet on {platform.upper()}; "
            f"supported: {', '.join(WORKERS).upper()}"
        )
    worker = WORKERS[platform]
    if chosen not in ("auto", worker):
        raise ConfigError(f"worker_cls: got {chosen!r}; method 'adaptivespec' needs its own worker; allowed: 'auto'")
    return worker
