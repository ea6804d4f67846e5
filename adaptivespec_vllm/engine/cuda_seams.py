"""The symbols of vLLM that only the CUDA runner touches, with the arguments that it calls them with."""

from __future__ import annotations

from adaptivespec_vllm.engine.seam import Seam

_FORWARD = (
    "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale",
)  # fmt: skip
_VARLEN = (
    "q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k", "softmax_scale", "causal",
    "block_table", "return_softmax_lse", "fa_version",
)  # fmt: skip
_FLASH = "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl"
_TRITON = "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl"
_GRAPHS = "vllm.config:CUDAGraphMode"


def _cuda(path: str, why: str, takes: tuple[str, ...] = ()) -> Seam:
    return Seam(path, why, platform="cuda", takes=takes)


CUDA = (
    _cuda("vllm.v1.worker.gpu_worker:Worker.init_device", "refusals come first"),
    _cuda("vllm.v1.worker.gpu_worker:Worker._make_model_runner", "builds the runner"),
    _cuda("vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model", "costs are measured once graphs are captured"),
    _cuda("vllm.v1.worker.gpu_worker:Worker.determine_available_memory", "our buffers are left out of the KV cache"),
    _cuda("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "base class of our runner"),
    _cuda(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model", "attention learns trees", ("load_dummy_weights",)
    ),
    _cuda(f"{_GRAPHS}.FULL_AND_PIECEWISE", "whole-model graphs are left out"),
    _cuda(f"{_GRAPHS}.PIECEWISE", "the same"),
    _cuda("vllm.envs:VLLM_USE_BREAKABLE_CUDAGRAPH", "graphs over the head's output are refused"),
    *(_cuda(f"{impl}.forward", "rows without a tree", _FORWARD) for impl in (_FLASH, _TRITON)),
    *(
        _cuda(
            f"{impl}.do_kv_cache_update", "commit of accepted KV", ("layer", "key", "value", "kv_cache", "slot_mapping")
        )
        for impl in (_FLASH, _TRITON)
    ),
    *(
        _cuda(f"vllm.v1.attention.backends.{name}", "blocks of a request", ("block_table",))
        for name in ("flash_attn:FlashAttentionMetadata", "triton_attn:TritonAttentionMetadata")
    ),
    _cuda(
        "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func",
        "the prefix part of tree attention",
        _VARLEN,
    ),
    _cuda("vllm.utils.torch_utils:canonicalize_singleton_dim_strides", "strides that its kernels take"),
    _cuda(
        "vllm.v1.attention.ops.merge_attn_states:merge_attn_states",
        "joins prefix and tree",
        ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse"),
    ),
    _cuda(
        "vllm.forward_context:set_forward_context",
        "a level of the head under vLLM's graphs",
        (
            "attn_metadata",
            "vllm_config",
            "num_tokens",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
            "batch_descriptor",
            "slot_mapping",
        ),
    ),
    *(
        _cuda(f"vllm.v1.spec_decode.eagle:EagleProposer.{name}", "the same", takes)
        for name, takes in {
            "_determine_batch_execution_and_padding": ("num_tokens",),
            "build_model_inputs_first_pass": ("num_tokens", "num_input_tokens", "mm_embed_inputs"),
            "_get_slot_mapping": ("num_tokens", "slot_mapping"),
        }.items()
    ),
    _cuda(
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch",
        "sizes of graphs, for measured costs",
        ("num_tokens",),
    ),
)
