"""What each request of the V2 runner may draft and accept, by request slot.

What a request asks for is known on the host when it begins. What it has accepted and given up so far is counted on the
device, where a step needs it before the host could know.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from adaptivespec_vllm.config import AdaptiveSpecConfig
from adaptivespec_vllm.engine.overrides import Overrides, overrides_of
from adaptivespec_vllm.policy.guard import allowance
from adaptivespec_vllm.rules import make_rule
from adaptivespec_vllm.types import MarginLimits, RequestSignal, TreeBatch, TreeShape, VerifyResult

STRICT = -1.0
"""``max_log_ratio`` of a request that promotes nothing."""

NO_LIMIT = -1
"""``max_promotions`` of a request that may promote as often as it likes."""


class RequestLimits:
    """Limits of all request slots.

    Args:
        slots: request slots.
        settings: of the server.
        eos: token ids that end a text.
        device: where the counts are.

    """

    def __init__(self, slots: int, settings: AdaptiveSpecConfig, eos: set[int], device: torch.device) -> None:
        self.configure(settings)
        self._eos = eos
        self._device = device
        self._paused: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.overrides: dict[int, Overrides] = {}
        self.is_chain = np.zeros(slots, dtype=bool)
        """The request's parameters look at the tokens before a row, so its drafts follow each other."""
        self._looks_ahead = np.zeros(slots, dtype=bool)
        self._log_ratio = np.full(slots, STRICT, dtype=np.float32)
        self._promotions = np.full(slots, NO_LIMIT, dtype=np.int32)
        self._protected = np.full((slots, 1), -1, dtype=np.int32)
        self.regret = torch.zeros(slots, device=device)
        """Nats that promotions gave up since the request began."""
        self.acceptance = torch.zeros(slots, device=device)
        """Rolling acceptance."""

    def configure(self, settings: AdaptiveSpecConfig) -> None:
        """Use these settings for requests that begin from now on."""
        self._settings = settings
        rule = make_rule(settings)
        self._has_window = rule is not None and rule.window > 0

    def pause(self, request: str, slot: int) -> None:
        """A request gives up its slot and will begin anew in another one."""
        self._paused[request] = self.regret[slot].clone(), self.acceptance[slot].clone()

    def forget(self, request: str) -> None:
        """A request has ended."""
        self._paused.pop(request, None)

    def add(self, request: str, slot: int, params: Any) -> None:
        """A request begins in a slot, or goes on; ``params`` are its ``SamplingParams``."""
        overrides = self.overrides[slot] = overrides_of(params.extra_args, self._settings)
        self.is_chain[slot] = needs_chain(params)
        self.regret[slot], self.acceptance[slot] = self._paused.pop(request, (0.0, self._settings.signal.initial))
        # As if the request had done well so far: what it has done, the device knows.
        allowed = allowance(overrides.margin, self._settings.guard, RequestSignal(acceptance=1.0))
        # vLLM counts a token of the budget where it is drawn, and a window is drawn before it stands.
        is_strict = allowed.strict or (self._has_window and params.thinking_token_budget is not None)
        looks_ahead = overrides.margin is not None and overrides.margin.looks_ahead
        # A sampled choice is drawn for its row alone, and a chain's logits change with what is passed over.
        self._looks_ahead[slot] = looks_ahead and params.temperature == 0 and not self.is_chain[slot]
        self._log_ratio[slot] = STRICT if is_strict else allowed.max_log_ratio
        self._promotions[slot] = NO_LIMIT if allowed.max_promotions is None else allowed.max_promotions
        protected = sorted(params.all_stop_token_ids | self._eos)
        if len(protected) >= self._protected.shape[1]:
            # At least one -1 in every row: it also keeps drafts that are none from being promoted.
            wider = np.full((len(self._protected), len(protected) + 1), -1, dtype=np.int32)
            wider[:, : self._protected.shape[1]] = self._protected
            self._protected = wider
        self._protected[slot] = -1
        self._protected[slot, : len(protected)] = protected

    def bound(self, slot: int, shape: TreeShape) -> TreeShape:
        """The largest tree of the request in a slot, in a step where the policy gives it ``shape``."""
        shape = self.overrides[slot].bound(shape)
        return TreeShape(shape.depth, 1, min(shape.depth, shape.nodes)) if self.is_chain[slot] else shape

    def margins(self, slots: torch.Tensor, slots_np: np.ndarray) -> MarginLimits | None:
        """The margin rule of requests ``slots [B]`` in this step; None where all are strict."""
        ratios = self._log_ratio[slots_np]
        if (ratios < 0).all():
            return None
        guard = self._settings.guard
        ratio = self._to_device(ratios)
        if guard.min_acceptance > 0:
            ratio = ratio.masked_fill(self.acceptance[slots] < guard.min_acceptance, STRICT)
        left = torch.full_like(ratio, math.inf)
        if guard.max_regret is not None:
            left = guard.max_regret - self.regret[slots]
            ratio = ratio.masked_fill(left <= 0, STRICT)
        return MarginLimits(
            max_log_ratio=ratio,
            max_promotions=self._to_device(self._promotions[slots_np]),
            max_regret=left,
            protected=self._to_device(self._protected[slots_np]),
        )

    def looking_ahead(self, slots_np: np.ndarray) -> torch.Tensor | None:
        """``bool [B]``, which of these requests look ahead; None where none does."""
        chosen = self._looks_ahead[slots_np]
        return self._to_device(chosen) if chosen.any() else None

    def count(self, slots: torch.Tensor, batch: TreeBatch, result: VerifyResult, emitting: torch.Tensor) -> None:
        """Learn what became of the trees of requests ``slots [B]``; of those that are ``emitting`` only."""
        self.regret[slots] += torch.where(emitting, result.regrets, 0.0)
        depth = torch.where(batch.tokens >= 0, batch.depths, 0)
        owners = torch.repeat_interleave(
            torch.arange(len(slots), device=slots.device), batch.start.diff().long(), output_size=len(depth)
        )
        drafted = torch.zeros_like(result.lengths).scatter_reduce_(0, owners, depth, "amax")
        alpha = self._settings.signal.alpha
        before = self.acceptance[slots]
        share = (result.lengths / drafted.clamp(min=1)).clamp(max=1.0)
        after = (1.0 - alpha) * before + alpha * share
        self.acceptance[slots] = torch.where(emitting & (drafted > 0), after, before)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(values, device=self._device)


def needs_chain(params: Any) -> bool:
    """Whether logits at a row depend on the drafts before it, which vLLM's kernels take for a text."""
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1.0)
    return bool(
        any(penalties)
        or params.bad_words
        or params.structured_outputs is not None
        or params.thinking_token_budget is not None
    )
