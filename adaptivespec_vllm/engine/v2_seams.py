"""What the V2 model runner needs of vLLM, beside what both do."""

from __future__ import annotations

from adaptivespec_vllm.engine.seam import Seam


def _v2(path: str, why: str, platform: str = "") -> Seam:
    return Seam(f"vllm.v1.worker.gpu.{path}", why, platform=platform, runner="V2")


V2: list[Seam] = [
    *(
        _v2(f"model_runner:GPUModelRunner.{name}", why)
        for name, why in (
            ("load_model", "attention and verification learn trees"),
            ("initialize_kv_cache", "layout of the cache"),
            ("finish_requests", "end or preemption of a request"),
            ("add_requests", "what a request may draft and accept"),
            ("execute_model", "start of a step"),
            ("prepare_inputs", "rows of the batch matched with trees"),
            ("prepare_attn", "tree positions and slots, after vLLM's own"),
            ("postprocess_sampled", "moment at which accepted KV is committed"),
            ("sample_tokens", "end of a step"),
            ("take_draft_token_ids", "how many nodes of each request are verified"),
        )
    ),
    Seam("vllm.v1.outputs:DraftTokenIds", "the same", runner="V2"),
    Seam(
        "vllm.v1.outputs:AsyncModelRunnerOutput.get_output", "a step's output, with what became of trees", runner="V2"
    ),
    Seam(
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin._set_active_loras",
        "an adapter for every row of logits",
        runner="V2",
    ),
    Seam("vllm.v1.worker.cpu.model_runner:CPUModelRunner", "base class of our runner", platform="cpu", runner="V2"),
    _v2("model_states.default:DefaultModelState.prepare_attn", "attach the trees"),
    _v2("spec_decode.eagle.speculator:EagleSpeculator", "base class of our speculator"),
    _v2("spec_decode.eagle.speculator:EagleSpeculator.load_model", "the head is packed once it is loaded"),
    _v2("spec_decode.speculator:DraftModelSpeculator.sample_draft", "rows that are drafted from"),
    _v2("spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator.propose", "first pass of the head"),
    _v2("spec_decode.rejection_sampler:RejectionSampler.__call__", "walk of the trees"),
    _v2("sample.sampler:Sampler.apply_sampling_params", "the distribution that a choice is drawn from"),
    _v2("sample.gumbel:gumbel_sample", "the target's choices, with plain decoding's noise"),
    _v2("sample.logprob:compute_topk_scores", "log-probabilities of emitted tokens"),
    _v2("sample.output:SamplerOutput", "what a verification gives"),
    _v2("metrics.logits:get_num_nans", "as vLLM's verification counts them"),
    _v2("input_batch:InputBatch", "rows of a step"),
    _v2("input_batch:get_num_sampled_and_rejected", "partial prefills emit nothing"),
    _v2("states:RequestState", "slots, draft tokens and texts of requests"),
    _v2("block_table:BlockTables", "slots of rows that were put off"),
    Seam("vllm.v1.request:Request", "placeholders of drafts that are not worth it are cut", runner="V2"),
    _v2("attn_utils:build_slot_mappings_by_layer", "true slots for the head's first pass"),
    _v2("async_utils:AsyncOutput.get_output", "what became of trees goes with vLLM's own output"),
    _v2("async_utils:async_copy_to_np", "the same"),
    _v2("async_utils:stream", "the same"),
]
"""On the platforms where it is offered."""
