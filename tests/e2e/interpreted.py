"""Twins in torch of two kernels of vLLM that Triton's interpreter cannot run."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu import structured_outputs


def replace_kernels() -> None:
    """For this process."""
    topk_topp_sampler.HAS_TRITON = False  # vLLM has the twin itself
    structured_outputs.StructuredOutputsWorker.apply_grammar_bitmask = apply_grammar_bitmask


def apply_grammar_bitmask(
    worker: Any, logits: torch.Tensor, input_batch: Any, grammar_req_ids: list[str], grammar_bitmask: Any
) -> None:
    """As vLLM's: tokens whose bit is not set get -inf, in the row of each request and place that the masks are for."""
    rows = structured_outputs._build_grammar_mapping(
        input_batch.req_ids,
        grammar_req_ids,
        input_batch.cu_num_logits_np,
        input_batch.num_draft_tokens_per_req,
        worker.num_bonus_tokens,
        worker.mask_stride,
    )
    bits = torch.arange(32)
    for mapped, words in zip(rows, torch.from_numpy(grammar_bitmask), strict=True):
        request, place = divmod(mapped, worker.mask_stride)
        row = int(input_batch.cu_num_logits_np[request]) + place
        allowed = (words[:, None] >> bits & 1).bool().flatten()[: logits.shape[1]]
        logits[row].masked_fill_(~allowed, -torch.inf)
