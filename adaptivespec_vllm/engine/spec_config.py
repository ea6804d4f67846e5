"""Our settings as a vLLM speculative configuration.

To the rest of vLLM it is an ``eagle3`` configuration whose ``num_speculative_tokens`` is the cap on draft nodes; the
settings travel with it to every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, SkipValidation, TypeAdapter, ValidationError
from vllm import envs
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config as vllm_config_class
from vllm.config.utils import is_init_field
from vllm.platforms import current_platform

from adaptivespec_vllm.attention import ALLOWED as ATTENTIONS
from adaptivespec_vllm.config import AdaptiveSpecConfig, ConfigError, load, reason, shortened, shown
from adaptivespec_vllm.engine import head, ranks, seams
from adaptivespec_vllm.engine.metrics import carry

WORKERS = {
    "cpu": "adaptivespec_vllm.engine.v1.cpu_worker.AdaptiveSpecCPUWorker",
    "cuda": "adaptivespec_vllm.engine.v1.cuda_worker.AdaptiveSpecCUDAWorker",
}
"""Worker class of each supported platform."""

V2_WORKERS = {"cpu": "adaptivespec_vllm.engine.v2.worker.AdaptiveSpecCPUWorkerV2"}
"""Those with the V2 model runner."""

SCHEDULER = "adaptivespec_vllm.engine.v1.scheduler.TreeScheduler"
"""Scheduler class, whose grammars follow trees."""

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
_PLAIN_KV = ("auto", "float16", "bfloat16", "float32")
_MIN_MODEL_LEN = 2
_FORCED = {"disable_padded_drafter_batch": (True, "requests draft different numbers of tokens")}
_FORCED_ON_V2 = {"disable_padded_drafter_batch": (False, "the V2 model runner pads the drafts of a batch")}


@vllm_config_class
class AdaptiveSpecSpeculativeConfig(SpeculativeConfig):
    """vLLM's speculative configuration with ours inside."""

    adaptivespec: SkipValidation[AdaptiveSpecConfig] = Field(default=None)  # type: ignore[assignment]
    """Settings of the method; always set when built by :func:`build`."""

    built_by: SkipValidation[ranks.Build] = Field(default=None)  # type: ignore[assignment]
    """What the process is that called :func:`build`; workers compare themselves with it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A process that is sent this configuration passes on what workers count, or shows it."""
        self.__dict__.update(state)
        carry.install()

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


def runner() -> Literal["V1", "V2"]:
    """The model runner that is used: V2 where vLLM is told to use it.

    Left alone, vLLM takes V1 with our method (see :func:`front_end.v2_unsupported_features`).
    """
    return "V2" if envs.VLLM_USE_V2_MODEL_RUNNER else "V1"


def why_runner() -> str:
    """Why it is this one."""
    if envs.VLLM_USE_V2_MODEL_RUNNER is None:
        return "with this method, unless VLLM_USE_V2_MODEL_RUNNER=1"
    return f"VLLM_USE_V2_MODEL_RUNNER={int(envs.VLLM_USE_V2_MODEL_RUNNER)}"


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
    _check_attention(settings.attention)
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
    vllm_keys |= {key: value for key, (value, _) in _forced().items()}
    try:
        config = AdaptiveSpecSpeculativeConfig(
            **vllm_keys,
            method="eagle3",
            model=settings.model,
            num_speculative_tokens=settings.max_nodes,
            target_model_config=target_model,
            target_parallel_config=target_parallel,
            adaptivespec=settings,
            built_by=ranks.Build.of(settings),
        )
    except ConfigError:
        raise
    except Exception as error:  # vLLM and its libraries raise anything for a head that they cannot read
        name = shortened(str(settings.model), 240)
        raise ConfigError(f"speculative_config with model {name!r}: {reason(error)}") from error
    target_parallel.worker_cls = worker
    carry.install()
    return config


def choose_scheduler(scheduler_config: Any) -> None:
    """Ask for our scheduler, by vLLM's own option ``scheduler_cls``. With the V2 runner vLLM's own does."""
    if runner() == "V2":
        return
    if scheduler_config.scheduler_cls not in (None, SCHEDULER):
        raise ConfigError(
            f"scheduler_cls: got {scheduler_config.scheduler_cls!r}; method 'adaptivespec' needs its own scheduler, "
            "whose grammars follow trees; allowed: null"
        )
    scheduler_config.scheduler_cls = SCHEDULER


def _check_foreign(key: str, value: Any) -> None:
    field = SpeculativeConfig.__pydantic_fields__[key]  # type: ignore[attr-defined]
    why = _why_refused(key)
    if why is not None and value != field.get_default():
        raise ConfigError(f"{key}: got {_got(value)}; not allowed with method 'adaptivespec': {why}")
    forced = _forced()
    if key in forced and value != forced[key][0]:
        wanted, why = forced[key]
        raise ConfigError(f"{key}: got {_got(value)}; allowed: {wanted!r}, because {why}")
    if value is None:
        return
    if key == "attention_backend":  # vLLM turns its name into a member of its enumeration
        _check_attention_backend(value)
        return
    kinds = set(get_args(field.annotation) or (field.annotation,))
    if bool in kinds and type(value) is not bool:
        null = " or null" if NoneType in kinds else ""
        raise ConfigError(f"{key}: got {_got(value)}; allowed: true or false{null}")
    try:
        # numbers and names are taken as they are, objects from what they are written as
        strict = kinds <= {int, str, NoneType}
        TypeAdapter(Annotated[field.annotation, Field(), *field.metadata]).validate_python(value, strict=strict)
    except ValidationError as error:
        raise ConfigError(f"{key}: got {_got(value)}; {_first_line(error)}") from None
    if key in _CHECKS:
        _CHECKS[key](value)


def _got(value: Any) -> str:
    try:
        return shortened(repr(value))
    except (ValueError, RecursionError):
        return shown(value)


def _check_attention_backend(value: Any) -> None:
    """By vLLM's own names; a CPU has one backend, and takes no notice of the key."""
    backends: Any = seams.ATTENTION_BACKENDS.resolve()
    name = value.name if isinstance(value, backends) else value
    known = [backend.name for backend in backends]
    if isinstance(name, str) and name.lower() == "auto":
        return
    if not isinstance(name, str) or name.upper() not in known:
        raise ConfigError(f"attention_backend: got {_got(value)}; allowed: {', '.join(sorted(known))} or null")
    if current_platform.is_cpu() and name.upper() != "CPU_ATTN":
        raise ConfigError(
            f"attention_backend: got {_got(name)}; it has no effect on a CPU; allowed there: 'CPU_ATTN' or null"
        )


def _check_attention(name: str) -> None:
    allowed = ATTENTIONS.get(_platform(), ())
    if allowed and name not in allowed:
        raise ConfigError(f"attention: got {name!r}; allowed on {_platform().upper()}: {', '.join(map(repr, allowed))}")


def _check_kv_cache_dtype(value: Any) -> None:
    if value not in _PLAIN_KV:
        raise ConfigError(
            f"kv_cache_dtype: got {_got(value)}; tree attention reads KV of the head as the model computes it; "
            "allowed: 'auto'"
        )


def _check_quantization(value: Any) -> None:
    known = [*seams.QUANTIZATIONS.resolve()]
    if value not in known:
        raise ConfigError(f"quantization: got {_got(value)}; allowed: {', '.join(sorted(known))} or null")
    try:
        current_platform.verify_quantization(value)
    except ValueError as error:
        raise ConfigError(f"quantization: got {_got(value)}; {error}") from None


def _check_max_model_len(value: int) -> None:
    if value < _MIN_MODEL_LEN:
        raise ConfigError(
            f"max_model_len: got {value}, so nothing would be drafted; allowed: an integer of at least {_MIN_MODEL_LEN}"
        )


def _check_load_config(value: Any) -> None:
    load_format = value.get("load_format") if isinstance(value, Mapping) else getattr(value, "load_format", None)
    if load_format == "dummy":
        raise ConfigError(
            "draft_load_config.load_format: got 'dummy'; a head of random weights drafts nothing that is accepted; "
            "allowed: a format that loads its weights"
        )


_CHECKS: dict[str, Callable[[Any], None]] = {
    "kv_cache_dtype": _check_kv_cache_dtype,
    "quantization": _check_quantization,
    "max_model_len": _check_max_model_len,
    "draft_load_config": _check_load_config,
}


def _forced() -> dict[str, tuple[Any, str]]:
    """Keys of vLLM that have one value only, and why."""
    return _FORCED_ON_V2 if runner() == "V2" else _FORCED


def _why_refused(key: str) -> str | None:
    by_prefix = (why for prefix, why in _REFUSED_PREFIXES.items() if key.startswith(prefix))
    return _REFUSED.get(key) or next(by_prefix, None)


def _first_line(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    return str(fault["msg"]).removeprefix("Value error, ")


def _platform() -> str:
    """Kind of device; what vLLM calls 'cuda' on AMD hardware is another one."""
    return "rocm" if current_platform.is_rocm() else str(current_platform.device_type)


def _worker(chosen: Any) -> str:
    platform = _platform()
    workers = V2_WORKERS if runner() == "V2" else WORKERS
    if platform not in workers:
        raise ConfigError(
            f"method: 'adaptivespec' is not supported yet on {platform.upper()} with the {runner()} model runner; "
            f"supported: {', '.join(workers).upper()}"
        )
    worker = workers[platform]
    if chosen not in ("auto", worker):
        raise ConfigError(f"worker_cls: got {chosen!r}; method 'adaptivespec' needs its own worker; allowed: 'auto'")
    return worker
