"""Every vLLM symbol that this package touches, in one place.

:data:`SEAMS` is the list; :func:`require` turns a vLLM version outside the supported range, or a symbol that is gone,
into one error that names it, and is called only where our method was asked for. :class:`Wrap` is the one way in which a
vLLM function is replaced: it keeps the original, records itself on the replacement and never applies twice.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.engine.cuda_seams import CUDA
from adaptivespec_vllm.engine.seam import TESTED_VLLM, Seam
from adaptivespec_vllm.engine.v2_seams import V2

SUPPORTED_VLLM = ((0, 32), (0, 34))
"""First supported and first unsupported (major, minor) of vLLM."""

SUPPORTED_VLLM_TEXT = "vllm>=0.32,<0.34"

_MARK = "__adaptivespec_wrap__"


class UnsupportedVLLM(ConfigError):
    """The installed vLLM is not one that this package can work with."""


@dataclass(frozen=True)
class SeamStatus:
    """Whether a seam was found."""

    seam: Seam
    error: str | None = None

    @property
    def found(self) -> bool:
        return self.error is None


def _runner(name: str, why: str) -> Seam:
    return Seam(f"vllm.v1.worker.gpu_model_runner:GPUModelRunner.{name}", why, runner="V1")


def _proposer(name: str, why: str) -> Seam:
    return Seam(f"vllm.v1.spec_decode.eagle:EagleProposer.{name}", why, runner="V1")


def _args(name: str, why: str) -> Seam:
    return Seam(f"vllm.engine.arg_utils:EngineArgs.{name}", why, "front")


ADD_CLI_ARGS = _args("add_cli_args", "--speculative-config takes a path")
CREATE_ENGINE_CONFIG = _args("create_engine_config", "a path in EngineArgs; refusals before workers start")
CREATE_SPECULATIVE_CONFIG = _args("create_speculative_config", "method 'adaptivespec' gives our configuration")
V2_UNSUPPORTED = Seam(
    "vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
    "vLLM chooses the V1 runner for our method, unless it is told to take V2",
    "front",
)

UPDATE_FROM_OUTPUT = Seam(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output", "a worker's counts go on with vLLM's own", "front"
)
STAT_LOGGER_MANAGER = Seam("vllm.v1.metrics.loggers:StatLoggerManager.__init__", "our metrics beside vLLM's", "front")
PROCESS_OUTPUTS = Seam(
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs", "promoted tokens in a request's record", "front"
)
VALIDATE_SPEC_DECODE = Seam(
    "vllm.sampling_params:SamplingParams._validate_spec_decode",
    "overrides of a request; parameters that trees honour are not refused",
    "front",
)

SUPPORTED_MODELS = Seam(
    "vllm.model_executor.models:ModelRegistry.get_supported_archs", "whether vLLM has a class for a head", "front"
)
ATTENTION_BACKENDS = Seam(
    "vllm.v1.attention.backends.registry:AttentionBackendEnum", "names that attention_backend may have", "front"
)
QUANTIZATIONS = Seam(
    "vllm.model_executor.layers.quantization:QUANTIZATION_METHODS", "names that quantization may have", "front"
)

HEAD_LOADING = tuple(
    Seam(f"vllm.model_executor.models.{name}.load_weights", "a vocabulary map that is not needed is skipped")
    for name in ("llama_eagle3:Eagle3LlamaForCausalLM", "qwen3_eagle3:Eagle3Qwen3ForCausalLM")
)

SEAMS: list[Seam] = [
    *HEAD_LOADING,
    SUPPORTED_MODELS,
    ATTENTION_BACKENDS,
    QUANTIZATIONS,
    ADD_CLI_ARGS,
    CREATE_ENGINE_CONFIG,
    CREATE_SPECULATIVE_CONFIG,
    V2_UNSUPPORTED,
    UPDATE_FROM_OUTPUT,
    STAT_LOGGER_MANAGER,
    PROCESS_OUTPUTS,
    Seam("vllm.v1.metrics.stats:SchedulerStats.kv_connector_stats", "carries a step's counts", "front"),
    Seam("vllm.v1.engine:EngineCoreOutput.kv_transfer_params", "carries what became of a request", "front"),
    Seam("vllm.v1.metrics.stats:RequestSpecDecodeMetrics.to_dict", "a request's record in the response", "front"),
    Seam("vllm.v1.metrics.loggers:AggregateStatLoggerBase", "our stat logger is one", "front"),
    *(
        Seam(f"vllm.v1.metrics.loggers:AggregateStatLoggerBase.{name}", "what it is told", "front")
        for name in ("record", "log", "log_engine_initialized")
    ),
    Seam("vllm.v1.metrics.loggers:PrometheusStatLogger._histogram_cls", "kinds of metrics, Ray's or not", "front"),
    Seam("vllm.v1.outputs:ModelRunnerOutput", "carries a step's counts"),
    VALIDATE_SPEC_DECODE,
    Seam("vllm.exceptions:VLLMValidationError", "a request that is refused (HTTP 400)", "front"),
    Seam(
        "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls", "our scheduler, by the option scheduler_cls", "front"
    ),
    Seam("vllm.config.speculative:SpeculativeConfig", "our configuration is a subclass", "front"),
    Seam("vllm.config.speculative:SpeculativeConfig.compute_hash", "our settings enter the hash", "front"),
    Seam("vllm.config.utils:config", "decorator of vLLM's configuration classes", "front"),
    Seam("vllm.platforms:current_platform", "which worker to ask for", "front"),
    Seam("vllm.model_executor.models.interfaces:supports_eagle3", "a target without EAGLE-3 is refused", "front"),
    Seam("vllm.envs:VLLM_USE_V2_MODEL_RUNNER", "which model runner is asked for", "front"),
    Seam("vllm.triton_utils:HAS_TRITON", "the V2 runner needs Triton", "front"),
    Seam("vllm.v1.core.sched.scheduler:Scheduler", "base class of our scheduler", runner="V1"),
    *(
        Seam(f"vllm.v1.structured_output:StructuredOutputManager.{name}", "grammar masks along each node's path")
        for name in ("validate_tokens", "grammar_bitmask")
    ),
    Seam("vllm.v1.worker.gpu_model_runner:build_logitsprocs", "min_p and logit_bias on trees"),
    Seam("vllm.v1.sample.logits_processor:BUILTIN_LOGITS_PROCESSORS", "the same"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.init_device", "builds the runner", platform="cpu"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model", "costs are measured", platform="cpu"),
    Seam(
        "vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory",
        "our buffers are left out of the KV cache",
        platform="cpu",
    ),
    _runner("get_kv_cache_spec", "size of a KV block"),
    Seam("vllm.v1.worker.gpu_worker:Worker.finish_weight_update", "the head's packed copy follows new weights"),
    Seam("vllm.forward_context:set_forward_context", "passes whose costs are measured"),
    _runner("maybe_select_dummy_loras", "the same, of a target with adapters"),
    Seam("vllm.lora.layers:BaseLayerWithLoRA", "a layer that the head shares is wrapped for adapters"),
    Seam("vllm.distributed.parallel_state:get_tp_group", "all ranks use the same costs"),
    Seam("vllm.v1.worker.cpu_worker:CPUModelRunner", "class that the worker builds", platform="cpu"),
    Seam("vllm.v1.worker.cpu_model_runner:CPUModelRunner", "base class of our runner", platform="cpu"),
    _runner("execute_model", "start of a step"),
    _runner("_prepare_inputs", "tree positions and slots, after vLLM's own"),
    _runner("_build_attention_metadata", "attach the trees"),
    _runner("_model_forward", "time of the target's forward pass"),
    _runner("sample_tokens", "end of a step"),
    _runner("_update_states_after_model_execute", "moment at which accepted KV is committed"),
    _runner("_bookkeeping_sync", "generators on the CPU cannot be rewound"),
    _runner("_input_fits_in_drafter", "each tree is fitted by itself, not the batch by its longest request"),
    _runner("_on_request_state_removed", "end of a request"),
    _runner("initialize_kv_cache", "layout of the cache"),
    Seam("vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model", "attention learns trees", platform="cpu"),
    Seam("vllm.v1.worker.cpu_model_runner:CPUModelRunner.initialize_kv_cache", "layout of the cache", platform="cpu"),
    Seam("vllm.v1.worker.utils:AttentionGroup.get_metadata_builder", "metadata of the rows beside trees"),
    Seam("vllm.v1.attention.backend:CommonAttentionMetadata", "the same"),
    Seam("vllm.v1.spec_decode.eagle:EagleProposer", "base class of our proposer"),
    _proposer("load_model", "keep what the head's first pass returns"),
    _proposer("prepare_inputs", "rows of the accepted path"),
    _proposer("propose", "first pass of the head"),
    _proposer("set_inputs_first_pass", "rows that are drafted from"),
    _proposer("_set_positions", "rows beyond the head's window"),
    Seam("vllm.v1.sample.rejection_sampler:RejectionSampler.forward", "walk of the trees"),
    Seam("vllm.v1.sample.rejection_sampler:PLACEHOLDER_TOKEN_ID", "padding of emitted tokens"),
    Seam("vllm.v1.sample.sampler:Sampler.apply_logits_processors", "a step of the walk is a step of plain decoding"),
    Seam("vllm.v1.sample.sampler:Sampler.sample", "the same"),
    Seam("vllm.v1.sample.sampler:Sampler.gather_logprobs", "log-probabilities of emitted tokens"),
    Seam("vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder", "thinking budgets on trees"),
    Seam("vllm.v1.sample.metadata:SamplingMetadata", "what a batch samples with"),
    Seam("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p", "the distribution that a margin is taken on"),
    Seam("vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor", "min_tokens inside a tree"),
    Seam("vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor", "whether a batch samples plainly"),
    *(
        Seam(f"vllm.model_executor.layers.{name}", "a head whose levels can run on packed weights", platform="cpu")
        for name in (
            "linear:UnquantizedLinearMethod.apply",
            "vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply",
            "rotary_embedding.base:RotaryEmbedding.forward_native",
        )
    ),
    Seam("vllm.utils.torch_utils:async_tensor_h2d", "what the host knows goes to the device without a wait"),
    _runner("_sync_device", "the clock of measured costs waits for the device"),
    *CUDA,
    Seam("vllm._custom_ops:cpu_attn_reshape_and_cache", "probe of the cache layout", platform="cpu"),
    Seam(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
        "rows without a tree",
        platform="cpu",
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
        "commit of accepted KV",
        platform="cpu",
    ),
    *V2,
]


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution it came from."""
    try:
        import vllm
    except ImportError as error:
        raise UnsupportedVLLM(f"vllm: cannot be imported ({error}); needed: {SUPPORTED_VLLM_TEXT}") from None
    return str(vllm.__version__)


def check_version(version: str | None = None) -> str:
    """The installed version, or an error that names the supported range."""
    version = vllm_version() if version is None else version
    match = re.match(r"v?(\d+)\.(\d+)", version)
    first, end = SUPPORTED_VLLM
    if match is None or not first <= (int(match[1]), int(match[2])) < end:
        raise UnsupportedVLLM(f"vllm: version {version} is not supported; needed: {SUPPORTED_VLLM_TEXT}")
    return version


def check_seams(
    where: Literal["front", "worker"] | None = None, on: str | None = None, runner: Literal["V1", "V2"] = "V1"
) -> list[SeamStatus]:
    """Status of every seam of a process kind, platform (all of this machine's when not given) and model runner."""
    on = platform() if on is None else on
    wanted = [s for s in SEAMS if where in (None, s.where) and s.platform in ("", on) and s.runner in ("", runner)]
    return [_status(seam) for seam in wanted]


def require(where: Literal["front", "worker"], runner: Literal["V1", "V2"] = "V1") -> None:
    """Raise an error that names what is missing, if vLLM's version or a seam is not what we need."""
    version = check_version()
    missing = [status for status in check_seams(where, runner=runner) if not status.found]
    if missing:
        names = "; ".join(f"{status.seam.path} ({status.seam.why})" for status in missing)
        raise UnsupportedVLLM(f"vllm {version}: missing {names}; tested with {', '.join(TESTED_VLLM)}")


def _status(seam: Seam) -> SeamStatus:
    try:
        symbol = seam.resolve()
        lost = set(seam.takes) - inspect.signature(symbol).parameters.keys() if seam.takes else ()
        if lost:
            raise AttributeError(f"it takes no {', '.join(sorted(lost))} any more")
    except Exception as error:  # importing vLLM can fail in any way; all mean "not there"
        return SeamStatus(seam, f"{type(error).__name__}: {error}")
    return SeamStatus(seam)


def platform() -> str:
    """The kind of device that vLLM runs on here."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


@dataclass(frozen=True)
class Wrap:
    """A replacement of one vLLM function that calls the original.

    Attributes:
        seam: what is replaced.
        around: called as ``around(original, *args, **kwargs)``.

    """

    seam: Seam
    around: Callable[..., Any]

    def installed(self) -> bool:
        owner, name = self.seam.owner()
        return hasattr(getattr(owner, name), _MARK)

    def install(self) -> bool:
        """Put the replacement in place; False when it is there already."""
        if self.installed():
            return False
        owner, name = self.seam.owner()
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        original, around = getattr(owner, name), self.around

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(replacement, _MARK, self)
        setattr(owner, name, staticmethod(replacement) if static else replacement)
        return True

    def uninstall(self) -> None:
        """Put the original back; for tests."""
        owner, name = self.seam.owner()
        replacement = getattr(owner, name)
        if hasattr(replacement, _MARK):
            static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            original = replacement.__wrapped__
            setattr(owner, name, staticmethod(original) if static else original)
