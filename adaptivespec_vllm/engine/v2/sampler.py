"""Verification on the V2 runner, in the place of vLLM's rejection sampler.

The target's choice after every row is drawn at once, as plain decoding draws it at that position: vLLM's sampler keys
its noise by (seed, position), and rows of one depth stand at one position. The walk then follows the choices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import NO_TOKEN
from adaptivespec_vllm.rules import Rule
from adaptivespec_vllm.types import MarginLimits, TreeBatch, VerifyResult
from adaptivespec_vllm.verify import acceptable_part, worthwhile_part

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v2.runner import TreeModelRunner
    from adaptivespec_vllm.engine.v2.step import TreeStep


class TreeRejectionSampler(RejectionSampler):
    """Walks the trees of a step; vLLM's sampler gives the target's choices."""

    def __init__(self, runner: TreeModelRunner) -> None:
        super().__init__(runner.sampler, runner.speculative_config, runner.device)
        self.runner = runner

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Verify the trees of the step; arguments and result as in vLLM, columns up to the deepest tree."""
        step = self.runner.step
        assert step is not None
        if invalid_drafts is not None:  # a grammar was not asked about them
            step.batch.tokens.masked_fill_(invalid_drafts, NO_TOKEN)
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        processed, chosen = self._choices(logits, input_batch)
        step.margins = self.runner.margin_limits(input_batch)
        ahead = self.runner.limits.looking_ahead(input_batch.idx_mapping_np)
        step.result = walk(processed, step.batch, step.margins, chosen, self.runner.max_depth, self.runner.rule, ahead)
        sampled = emitted_tokens(step, step.result)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            step.result.lengths + 1,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        shown = processed if self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES else logits
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=self._logprobs(shown, input_batch, step, sampled),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _choices(self, logits: torch.Tensor, input_batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the distribution at each row, tempered and truncated, and a draw from it."""
        sampler, rows = self.sampler, input_batch.logits_indices
        positions = input_batch.positions[rows]
        processed = sampler.apply_sampling_params(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            positions,
            input_batch.input_ids[rows],
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
        )
        chosen = gumbel_sample(
            processed,
            input_batch.expanded_idx_mapping,
            sampler.sampling_states.temperature.gpu,
            sampler.sampling_states.seeds.gpu,
            positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=sampler.use_fp64_gumbel,
        )
        return processed, chosen

    def _logprobs(
        self, logits: torch.Tensor, input_batch: InputBatch, step: TreeStep, sampled: torch.Tensor
    ) -> LogprobsTensors | None:
        """The target's log-probabilities of each emitted token, at the node it was emitted from, where asked for.

        vLLM takes row j of a request's rows for its j-th emitted token, so the accepted path is presented as a chain.
        """
        asked = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        if asked is None:
            return None
        assert step.result is not None
        count, most_ids = asked
        starts = input_batch.cu_num_logits[:-1].long()
        columns = torch.arange(sampled.shape[1], device=sampled.device)
        nodes = torch.nn.functional.pad(step.result.paths.long(), (1, 0))
        emitting = columns <= step.result.lengths[:, None]
        none = len(logits)  # a row of its own for columns in which nothing is emitted
        targets = torch.where(emitting, starts[:, None] + columns, none).flatten()
        chain = torch.arange(none + 1, device=logits.device)
        chain.scatter_(0, targets, torch.where(emitting, starts[:, None] + nodes, none).flatten())
        tokens = torch.zeros(none + 1, dtype=torch.int64, device=logits.device)
        tokens.scatter_(0, targets, torch.where(emitting, sampled, 0).flatten())
        return compute_topk_scores(
            logits[chain[:none]],
            count,
            tokens[:none],
            input_batch.cu_num_logits_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=input_batch.expanded_idx_mapping,
            max_per_req_token_ids=most_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


def walk(
    logits: torch.Tensor,
    trees: TreeBatch,
    margins: MarginLimits | None,
    choices: torch.Tensor,
    max_depth: int,
    rule: Rule | None,
    ahead: torch.Tensor | None,
) -> VerifyResult:
    """Follow the target's choices through every tree.

    Args:
        logits: ``[T, vocabulary]`` that the choices were drawn from, row i belongs to row i of ``trees``.
        trees: of the step.
        margins: of each request; None where all are strict.
        choices: ``int64 [T]``.
        max_depth: columns of the paths.
        rule: which tokens may be promoted within ``margins``; None is any.
        ahead: ``bool [B]``, the requests that look ahead; None where none does.

    """
    if rule is not None and margins is not None:
        trees = acceptable_part(logits, trees, rule, choices)
    if ahead is not None and margins is not None:
        trees = worthwhile_part(logits, trees, margins, ahead, max_depth)
    return ops.walk_trees(logits, trees, margins, choices, max_depth)


def emitted_tokens(step: TreeStep, result: VerifyResult) -> torch.Tensor:
    """``int64 [B, D + 1]``: accepted tokens, then the target's own; whatever is behind them means nothing."""
    nodes = result.paths.long().clamp(min=0)
    accepted = step.batch.tokens[step.batch.start[:-1, None].long() + nodes].long()
    tokens = torch.nn.functional.pad(accepted, (0, 1))
    return tokens.scatter_(1, result.lengths[:, None].long(), result.next_tokens[:, None])
