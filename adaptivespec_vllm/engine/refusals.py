"""Combinations that this package does not support, refused at start with the setting and the reason.

Each check is one small function that gives reasons; :func:`unsupported_reasons` gathers them, :func:`check` raises.
They run in the front end before workers start, again in each worker, and once more on the built layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.types import MAX_TREE_NODES

LOGITSPROCS_GROUP = "vllm.logits_processors"
"""Entry points whose processors vLLM applies to every request, but not with speculation."""


_ASYNC = "async_scheduling=True: drafting follows the bookkeeping of the step before; leave it unset"


class Unsupported(ConfigError):
    """A setting that cannot be combined with method 'adaptivespec'."""


def check_engine_args(engine_args: Any) -> None:
    """What has to be asked before vLLM resolves it, because it would be changed silently."""
    from vllm import envs

    if envs.VLLM_USE_V2_MODEL_RUNNER:
        check_triton()
    elif engine_args.async_scheduling:
        _raise([_ASYNC])


def check_triton() -> None:
    """Raise where vLLM has no Triton for the V2 model runner, which is asked for."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        _raise(["VLLM_USE_V2_MODEL_RUNNER=1: vLLM finds no Triton here, which its V2 model runner needs; unset it"])


def check(vllm_config: Any) -> None:
    """Raise one error that names every unsupported setting of a whole configuration."""
    _raise(unsupported_reasons(vllm_config))


def check_target_class(model_config: Any) -> None:
    """Raise for a target whose class in vLLM does not hand out the hidden states that a head reads."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    model_class, name = model_config.registry.resolve_model_cls(model_config.architectures, model_config)
    if not supports_eagle3(model_class):
        _raise([f"model {model_config.model!r}: vLLM's {name} does not support EAGLE-3 heads"])


def unsupported_reason(vllm_config: Any) -> str | None:
    """The first unsupported setting and why, or None."""
    return next(iter(unsupported_reasons(vllm_config)), None)


def unsupported_reasons(vllm_config: Any) -> list[str]:
    """Every unsupported setting of vLLM's whole configuration, each with its reason."""
    return [
        *_parallel(vllm_config.parallel_config),
        *_runner(vllm_config),
        *_target(vllm_config.model_config),
        *_attention(vllm_config.model_config.hf_text_config, "the target"),
        *_head(vllm_config.speculative_config, vllm_config.model_config.dtype),
        *_kv_cache(vllm_config),
        *_sampling(vllm_config.model_config),
        *_aux_output(vllm_config.aux_output_config),
        *_grammars(vllm_config.structured_outputs_config),
    ]


def check_layers(layers: Mapping[str, Any], dtype: Any) -> None:
    """Raise for attention layers, by name, that the tree attention cannot stand in for; ``dtype`` is the model's."""
    _raise([reason for name, layer in layers.items() for reason in _layer(name, layer, dtype)][:1])


def _raise(reasons: list[str]) -> None:
    if reasons:
        raise Unsupported(f"not supported with method 'adaptivespec': {'; '.join(reasons)}")


def _parallel(parallel: Any) -> Iterator[str]:
    sizes = {
        "pipeline_parallel_size": "accepted KV is committed by one stage",
        "data_parallel_size": "ranks would have to agree on tree shapes",
        "decode_context_parallel_size": "a tree's KV is not sharded",
        "prefill_context_parallel_size": "a tree's KV is not sharded",
    }
    for name, why in sizes.items():
        size = getattr(parallel, name, 1)
        if size > 1:
            yield f"{name}={size}: {why}; allowed: 1"


def _runner(vllm_config: Any) -> Iterator[str]:
    if vllm_config.use_v2_model_runner:
        yield from _v2(vllm_config)
    elif vllm_config.scheduler_config.async_scheduling:
        yield _ASYNC


def _v2(vllm_config: Any) -> Iterator[str]:
    """What trees on the V2 runner do not have yet."""
    v1 = "; set VLLM_USE_V2_MODEL_RUNNER=0"
    settings = vllm_config.speculative_config.adaptivespec
    if settings.tree.policy not in ("cost-aware", "adaptive", "static"):
        yield (
            f"tree.policy={settings.tree.policy!r} on the V2 model runner: it is there for comparison, on V1 alone; "
            f"allowed: 'cost-aware', 'adaptive', 'static'{v1}"
        )
    rows = settings.max_width * (settings.max_depth - 1)
    if rows > MAX_TREE_NODES:
        yield (
            f"a depth of {settings.max_depth} with a width of {settings.max_width} on the V2 model runner: {rows} "
            f"expanded nodes; allowed: {MAX_TREE_NODES}{v1}"
        )
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        yield f"tensor_parallel_size={vllm_config.parallel_config.tensor_parallel_size} on the V2 model runner{v1}"
    if vllm_config.model_config.return_sampling_mask:
        yield "return_sampling_mask=True: rows of a tree are not those of a text"
    if vllm_config.model_config.enable_trace_replay:
        yield "enable_trace_replay=True: rows of a tree are not those of a text"
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        yield "enable_batch_sharded_sampling=True: a batch of trees is walked as a whole"
    if vllm_config.watermark_config is not None:
        yield "watermark_config: tokens of a tree are verified as they are, without a watermark"


def _target(model: Any) -> Iterator[str]:
    kinds = {
        "use_mla": "multi-head latent attention: tree attention reads plain keys and values",
        "uses_mrope": "M-RoPE: a tree's positions are one number a token",
        "is_hybrid": "a hybrid model: recurrent state cannot follow a tree",
        "is_attention_free": "a model without attention: recurrent state cannot follow a tree",
        "has_inner_state": "a model with recurrent state: it cannot follow a tree",
        "is_encoder_decoder": "an encoder-decoder model: only decoders are verified as trees",
        "is_multimodal_model": "a multimodal model: the head does not see its inputs",
        "uses_alibi": "ALiBi: tree attention knows no position bias",
    }
    for name, why in kinds.items():
        if getattr(model, name, False):
            yield f"model {model.model!r} is {why}"
            return
    if getattr(model, "uses_xdrope_dim", 0):
        yield f"model {model.model!r} uses XD-RoPE: a tree's positions are one number a token"
    if model.runner_type != "generate":
        yield f"runner={model.runner_type!r}: only generation drafts tokens; allowed: 'generate'"


def _attention(text_config: Any, whose: str) -> Iterator[str]:
    window = getattr(text_config, "sliding_window", None)
    kinds = [kind for kind in getattr(text_config, "layer_types", None) or () if kind != "full_attention"]
    if window is not None:
        yield f"sliding_window={window} of {whose}: tree attention sees the whole prefix (disable_sliding_window=True)"
    elif kinds and kinds[0] != "attention":
        yield f"layer_types of {whose} hold {kinds[0]!r}: tree attention sees the whole prefix"
    for name in ("attn_logit_softcapping", "attn_logit_cap"):
        cap = getattr(text_config, name, None)
        if cap:
            yield f"{name}={cap} of {whose}: tree attention does not cap its scores"


def _plain_kv(cache_dtype: str | None, dtype: Any) -> bool:
    """Keys and values are kept as the model computes them."""
    return cache_dtype in (None, "auto", str(dtype).removeprefix("torch."))


def _head(speculative: Any, dtype: Any) -> Iterator[str]:
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        yield from _attention(draft.hf_config, "the head")
    cache_dtype = getattr(speculative, "kv_cache_dtype", None)
    if not _plain_kv(cache_dtype, dtype):
        yield f"kv_cache_dtype={cache_dtype!r} of the head: tree attention reads the model's dtype; allowed: 'auto'"


def _kv_cache(vllm_config: Any) -> Iterator[str]:
    cache_dtype = vllm_config.cache_config.cache_dtype
    if not _plain_kv(cache_dtype, vllm_config.model_config.dtype):
        yield f"kv_cache_dtype={cache_dtype!r}: tree attention reads the model's dtype; allowed: 'auto'"
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector is not None:
        yield f"kv_connector={transfer.kv_connector!r}: KV of a step is committed after it, not while it runs"


def _sampling(model: Any) -> Iterator[str]:
    installed = [point.name for point in entry_points(group=LOGITSPROCS_GROUP)]
    if model.logits_processors or installed:
        which = f" (installed: {', '.join(installed)})" if installed else ""
        yield f"logits_processors{which}: custom processors see one position a request, a tree has many"
    if model.enable_prompt_embeds:
        yield "enable_prompt_embeds=True: the head reads tokens"


def _aux_output(aux_output: Any) -> Iterator[str]:
    if aux_output.enable_return_routed_experts:
        yield "enable_return_routed_experts=True: rows of a tree are not those of a text"


def _grammars(structured: Any) -> Iterator[str]:
    if structured.backend == "lm-format-enforcer":
        yield f"structured_outputs_config.backend={structured.backend!r}: it cannot take back the tokens of a draft"


def _layer(name: str, layer: Any, dtype: Any) -> Iterator[str]:
    impl = getattr(layer, "impl", layer)
    if getattr(impl, "alibi_slopes", None) is not None:
        yield f"layer {name} uses ALiBi: tree attention knows no position bias"
    window = getattr(impl, "sliding_window", None)
    if window is not None and window != -1 and window != (-1, -1):
        yield f"layer {name} has a sliding window of {window}: tree attention sees the whole prefix"
    if getattr(impl, "logits_soft_cap", None):
        yield f"layer {name} caps its scores: tree attention does not"
    if getattr(impl, "sinks", None) is not None:
        yield f"layer {name} has attention sinks: tree attention has none"
    cache_dtype = getattr(impl, "kv_cache_dtype", "auto")
    if not _plain_kv(cache_dtype, dtype):
        yield f"layer {name} has kv_cache_dtype={cache_dtype!r}: tree attention reads the model's dtype"
