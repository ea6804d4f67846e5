"""What a difference in a later vLLM means here, by somebody who read both sources; for ``docs/vllm_compat.md``.

A symbol without a note has changed only in parts that this package neither sees nor relies on.
"""

from __future__ import annotations

_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode"
_AUTOREGRESSIVE = f"{_SPECULATOR}.target_dependent_ar.speculator:TargetDependentARSpeculator"

TRIED = {
    "0.33": (
        "No CPU build of 0.33 was to be had. Its Python code was run over the binaries of 0.32's CPU build, on the V1 "
        "runner: `tests/e2e/test_exactness.py` (15 passed), `test_structured_output.py` (53 passed, 4 skipped) and "
        "`test_requests.py` (42 passed). Not the V2 runner, and nothing on a GPU."
    )
}
"""Of a version what has been run on it."""

NOTES: dict[str, dict[str, str]] = {
    "0.33": {
        "vllm.config.speculative:SpeculativeConfig": (
            "new keys beside ours: `disable_lookahead_block_hashes`, `draft_lm_head_quantization`, `xpress_topc`, "
            "`fly_*`; they are passed on, not yet looked at"
        ),
        "vllm.config:VllmConfig": "with V2, a head with a smaller window now lowers `max_model_len` for all requests",
        "vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask": (
            "rows of a request are padded to the largest number of drafts, which the runners count on; "
            "`engine/v1/scheduler.py` lays masks of trees out in the way that it finds"
        ),
        "vllm.v1.outputs:AsyncModelRunnerOutput": "`get_kv_connector_output` is new and abstract; ours has it",
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p": "one more argument, whose default is right for us",
        "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func": "more arguments, none that we give",
        f"{_RUNNER}.postprocess_sampled": "another argument behind those that we name; passed on",
        f"{_RUNNER}.prepare_inputs": "other fields of the batch, not those that we read",
        f"{_RUNNER}.load_model": "the head's layers are set up elsewhere; ours calls this one first, as before",
        f"{_RUNNER}.sample_tokens": "`skip_drafts` and the order of KV connectors; ours calls this one",
        "vllm.v1.worker.gpu.input_batch:InputBatch": "new fields, and one that we do not read is gone",
        f"{_SPECULATOR}.speculator:DraftModelSpeculator.sample_draft": "another argument; ours takes any",
        f"{_SPECULATOR}.eagle.speculator:EagleSpeculator.max_model_len": "a property now; we only read it",
        f"{_AUTOREGRESSIVE}.propose": "data parallel only, which is refused",
        "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model": (
            "V2 warms kernels up by made-up steps through our runner: to be tried first on 0.33"
        ),
        "vllm.v1.spec_decode.eagle:EagleProposer.load_model": "marks the head's attention layers; ours calls this one",
        "vllm.v1.core.sched.scheduler:Scheduler.__init__": (
            "prefix caching keeps the last block of a hit by lookahead hashes instead of dropping it; nothing of ours "
            "depends on either"
        ),
        "vllm.v1.sample.rejection_sampler:RejectionSampler.__init__": (
            "`fly` of vLLM's own; our walk takes its place, and the key is refused"
        ),
        "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": "the same",
        f"{_SPECULATOR}.rejection_sampler:RejectionSampler.__init__": "the same",
    },
}
