"""Verification on the V1 runner, in the place of vLLM's rejection sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_model_runner

from adaptivespec_vllm.verify import StepwiseWalk

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v1.runner import TreeModelRunner
    from adaptivespec_vllm.engine.v1.step import Step


class TreeRejectionSampler(RejectionSampler):
    """Walks trees with the target's own sampler.

    Two ways: the fused walk (greedy, no logits processors), and the stepwise walk, an ordinary sampling step of vLLM's
    sampler a token (everything else).
    """

    runner: TreeModelRunner

    def __init__(self, runner: TreeModelRunner) -> None:
        super().__init__(runner.sampler, runner.speculative_config, runner.device)
        object.__setattr__(self, "runner", runner)  # not a submodule

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Verify the trees of the step; arguments and result as in vLLM."""
        step = self.runner.step
        if step is None:  # vLLM's own dummy runs
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        with self.runner.stats.timed("verify"):
            margins = self.runner.margins()
            processed: list[torch.Tensor] | None = None
            if is_plain_greedy(sampling_metadata):
                step.result = self.runner.verify(logits, margins)
            else:
                first_rows, active = step.batch.start[:-1].tolist(), self.runner.sampled_requests()
                walk = StepwiseWalk(step.trees, first_rows, margins, active, self.runner.rule)
                draw = _Draw(self, sampling_metadata, any(margins))
                step.result = walk.run(logits, draw)
                processed = draw.processed
            tokens = emitted_tokens(step)
            logprobs = self._logprobs(step, logits, tokens, sampling_metadata, processed)
            return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def _logprobs(
        self,
        step: Step,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        processed: Sequence[torch.Tensor] | None,
    ) -> LogprobsTensors | None:
        """The target's log-probabilities of each emitted token, at the node it was emitted from, where asked for."""
        most, chosen = sampling_metadata.max_num_logprobs, sampling_metadata.logprob_token_ids
        if most is None and not chosen:
            return None
        assert step.result is not None
        batch, columns = tokens.shape
        if self.is_processed_logprobs_mode and processed is not None:
            # One [B, V] distribution an emitted token; the walk of a request may end before others'.
            # A walk that was taken back has looked further than what it emits.
            stacked = torch.stack([*processed[:columns], *[processed[-1]] * (columns - len(processed))], dim=1)
            rows = stacked.reshape(batch * columns, -1)
        else:
            paths = step.result.paths[:, : columns - 1].clamp(min=0)
            nodes = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), paths], dim=1)[:, :columns]
            rows = logits[(step.batch.start[:-1, None] + nodes).flatten()].float()
        values = rows if self.is_logits_logprobs_mode else self.sampler.compute_logprobs(rows)
        emitted = tokens.flatten().clamp(min=0).long().to(values.device)
        if chosen:
            of_rows = {b * columns + column: ids for b, ids in chosen.items() for column in range(columns)}
            return self.sampler.gather_specific_token_logprobs(values, of_rows, emitted)
        return self.sampler.gather_logprobs(values, most, emitted)


@contextmanager
def all_logits_processors() -> Iterator[None]:
    """While it lasts, a runner gets all built-in logits processors, as without speculation.

    vLLM leaves out min_p and logit_bias, which its rejection sampler does not apply; the walks here do.
    """
    stock = gpu_model_runner.build_logitsprocs

    def build(vllm_config: VllmConfig, device: torch.device, pin_memory: bool, *args: Any) -> LogitsProcessors:
        return LogitsProcessors(kind(vllm_config, device, pin_memory) for kind in BUILTIN_LOGITS_PROCESSORS)

    gpu_model_runner.build_logitsprocs = build
    try:
        yield
    finally:
        gpu_model_runner.build_logitsprocs = stock


def sample_one_row_a_request(holder: ThinkingBudgetStateHolder | None) -> None:
    """Let thinking budgets take each row of logits for the next token of a request, as without speculation."""
    if holder is not None:
        holder.in_spec_mode = False


def _budgeted(metadata: SamplingMetadata) -> ThinkingBudgetStateHolder | None:
    """The state of thinking budgets, if a request of the batch has one."""
    holder = metadata.thinking_budget_state_holder
    return holder if holder is not None and holder.has_tracked_requests() else None


def is_plain_greedy(metadata: SamplingMetadata) -> bool:
    """Every request takes the arg-max of untouched logits."""
    return (
        metadata.all_greedy
        and metadata.no_penalties
        and _budgeted(metadata) is None
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and all(_idle(processor) for processor in metadata.logitsprocs.non_argmax_invariant)
    )


def emitted_tokens(step: Step) -> torch.Tensor:
    """``int32 [B, columns]``: accepted tokens, then the target's own, -1 padded."""
    result = step.result
    assert result is not None
    columns = int(result.lengths.max()) + 1
    tokens = torch.full((len(step.trees), columns), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
    at = torch.arange(columns)[None, :]
    lengths = result.lengths[:, None]
    paths = result.paths[:, :columns].clamp(min=0)
    rows = step.batch.start[:-1, None] + paths
    accepted = step.batch.tokens[rows.flatten().long()].view(rows.shape)
    width = rows.shape[1]
    tokens[:, :width] = torch.where(at[:, :width] < lengths, accepted, tokens[:, :width])
    return torch.where(at == lengths, result.next_tokens[:, None].int(), tokens)


class _Draw:
    """One sampling step of all walking requests, by vLLM's sampler."""

    def __init__(self, owner: TreeRejectionSampler, metadata: SamplingMetadata, keep_distribution: bool) -> None:
        self._sampler = owner.sampler
        self._metadata = metadata
        asked = metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)
        self._keep_processed = owner.is_processed_logprobs_mode and asked
        self._keep_distribution = keep_distribution
        self.processed: list[torch.Tensor] = []

    def __call__(
        self, logits: torch.Tensor, walking: list[bool], emitted: list[list[int]]
    ) -> tuple[list[int], torch.Tensor]:
        metadata = replace(
            self._metadata,
            # A request that is done (or only prefilled) must not use up its noise.
            generators={b: g for b, g in self._metadata.generators.items() if walking[b]},
            output_token_ids=[
                [*before, *new] if new else before
                for before, new in zip(self._metadata.output_token_ids, emitted, strict=True)
            ]
            if self._metadata.output_token_ids
            else [],
            spec_token_ids=None,
            logitsprocs=_Processors(self._metadata.logitsprocs, emitted),
        )
        with _budgets_of(_budgeted(metadata), walking):
            processed = self._sampler.apply_logits_processors(logits.float(), metadata, predict_bonus_token=False)
        distribution = self._distribution(processed, metadata) if self._keep_distribution else processed
        sampled, kept = self._sampler.sample(processed, metadata)
        if self._keep_processed:
            assert kept is not None
            self.processed.append(kept.clone())
        return sampled.tolist(), distribution

    @staticmethod
    def _distribution(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Logits of the tempered, truncated distribution of each request."""
        logits = logits.clone()
        if metadata.all_greedy:
            return logits
        assert metadata.temperature is not None
        random = metadata.temperature >= 1e-5
        tempered = logits / torch.where(random, metadata.temperature, 1.0)[:, None]
        for processor in metadata.logitsprocs.argmax_invariant:
            tempered = processor.apply(tempered)
        truncated = apply_top_k_top_p(tempered, metadata.top_k, metadata.top_p)
        return torch.where(random[:, None], truncated, logits)


@contextmanager
def _budgets_of(holder: ThinkingBudgetStateHolder | None, walking: list[bool]) -> Iterator[None]:
    """While it lasts, only the budgets of requests that still walk are counted: a token is counted once."""
    if holder is None:
        yield
        return
    states = holder._state
    holder._state = {b: state for b, state in states.items() if walking[b]}
    try:
        yield
    finally:
        holder._state = states


class _Processors:
    """vLLM's logits processors, at a point of the walk where ``emitted`` tokens are already accepted."""

    def __init__(self, stock: Any, emitted: list[list[int]]) -> None:
        self.argmax_invariant = stock.argmax_invariant
        self.non_argmax_invariant = [
            _MinTokensAt(p, emitted) if isinstance(p, MinTokensLogitsProcessor) else p
            for p in stock.non_argmax_invariant
        ]


class _MinTokensAt:
    """Bans stop tokens of requests that have not reached ``min_tokens`` with the tokens of this walk."""

    def __init__(self, stock: MinTokensLogitsProcessor, emitted: list[list[int]]) -> None:
        self._stock = stock
        self._emitted = emitted

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for b, (least, output, stop_ids, has_grammar) in self._stock.min_toks.items():
            if stop_ids and len(output) + len(self._emitted[b]) < least:
                ids = list(stop_ids)
                allowed = logits[b, ids]
                logits[b, ids] = -torch.inf
                if has_grammar and logits[b].isneginf().all():  # the grammar allows nothing but to stop
                    logits[b, ids] = allowed
        return logits


def _idle(processor: Any) -> bool:
    """It changes the logits of no request of the batch."""
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    return isinstance(processor, LogitBiasLogitsProcessor) and not processor.biases
