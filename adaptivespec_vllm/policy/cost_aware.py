"""Drafts what gains more tokens than its time is worth.

A step's time is a sum of measured costs, its tokens a sum of survival probabilities; time is worth the rate at which
tokens come in the long run. ``docs/policy.md`` has the formulae.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptivespec_vllm.config import AdaptiveSpecConfig, CostAwareTree
from adaptivespec_vllm.policy import choice
from adaptivespec_vllm.policy.base import Drafting, TreePolicy
from adaptivespec_vllm.policy.costs import UNMEASURED, Costs
from adaptivespec_vllm.policy.shape import bounded
from adaptivespec_vllm.policy.survival import KNOTS, MOST, Survival, level_of, probabilities_of
from adaptivespec_vllm.types import NO_TREE, RequestSignal, StepFeedback, TreeShape, Worth

LONGEST_WAIT = 64
"""Steps between two probes of a request that does not pay, at most."""

PROBE_SHARE = 0.01
"""Of the time of all steps, that probes may take in the long run."""

BEST_ACCEPTANCE = 0.9
"""A draft is not expected to be taken more often; where not even that would pay, probes have nothing to find out."""

PROBE_CREDIT = 1.0
"""Time that they may take besides, at the beginning or after others did without; in steps of plain decoding."""

_FADE_REQUEST = 1 - 1 / 24
"""A step of a request, in its correction."""

_STRENGTH = 4.0
"""Expected children that "this request is like all others" counts for."""

_SURPRISE = 3.0
"""A probe with so many times the accepted nodes that were expected says that the request has changed."""

_FADE_RATE = 1 - 1 / 64
"""An engine step, in the long-run rate."""


@dataclass(slots=True)
class CostSignal(RequestSignal):
    """What the policy keeps of a request besides."""

    taken: float = 0.0
    """Verified children that were taken, lately."""
    expected: float = 0.0
    """Those that should have been by what holds for all requests."""
    wait: int = 1
    """Steps to pass before a request that does not pay is probed; below 0, it is due."""
    pause: int = 1
    """Steps to pass after a probe that does not pay either."""

    @property
    def correction(self) -> float:
        """Factor on ``g``: how much better or worse than expected the draft does for this request."""
        return (self.taken + _STRENGTH) / (self.expected + _STRENGTH)

    def count_down(self, pays: bool) -> None:
        """One more step, in which drafting pays or does not."""
        if pays:
            self.pause = self.wait = max(1, self.pause // 2)
        else:
            self.wait -= 1

    def probe(self) -> None:
        """It drafts all the same; the next time it is twice as long until then."""
        self.pause = self.wait = min(LONGEST_WAIT, 2 * self.pause)


class CostAwarePolicy(TreePolicy):
    """Maximises tokens a second from measured costs and learnt acceptance; ``tree.shape`` is the largest tree."""

    Tree = CostAwareTree

    def __init__(self, config: AdaptiveSpecConfig, costs: Costs | None = None) -> None:
        super().__init__(config)
        assert config.tree.shape is not None
        self.shape = bounded(config.tree.shape.tree_shape(), config.max_nodes)
        named = Costs.read(config.tree.costs) if costs is None and config.tree.costs is not None else None
        self.costs: Costs = costs or named or UNMEASURED
        self.survival = Survival()
        self._emitted = self._plain = 16.0  # as if decoding plainly for a while
        self.credit = PROBE_CREDIT
        """Time left for probes, in steps of plain decoding."""
        self._drafting: _CostAware | None = None

    @classmethod
    def make(cls, config: AdaptiveSpecConfig, costs: Costs | None) -> CostAwarePolicy:
        return cls(config, costs)

    def new_signal(self) -> CostSignal:
        return CostSignal(acceptance=self.config.signal.initial)

    def signal(self, request: str) -> CostSignal:
        signal = super().signal(request)
        assert isinstance(signal, CostSignal)
        return signal

    @property
    def speedup(self) -> float:
        """Long-run tokens over those that plain decoding would have given in the same time; at least 1.

        The time is that of the cost tables, so a busy machine does not disturb it.
        """
        return max(1.0, self._emitted / self._plain)

    def rate(self, requests: int) -> float:
        """Tokens a second that a step of so many requests has to bring to be worth its time."""
        return self.speedup * self._plain_rate(requests)

    def _plain_rate(self, requests: int) -> float:
        return requests / self.costs.of_requests(requests)(requests)

    def begin(self, requests: Sequence[str], decoding: Sequence[bool], rows: Sequence[int] | None = None) -> Drafting:
        signals = [self.signal(request) for request in requests]
        self._drafting = _CostAware(self, requests, signals, np.array(decoding, dtype=bool), rows)
        return self._drafting

    def observe(self, feedbacks: Mapping[str, StepFeedback], drafting: Drafting | None = None) -> None:
        super().observe(feedbacks)
        if drafting is None:
            drafting, self._drafting = self._drafting, None
        if feedbacks:
            surprising = self._learn(feedbacks)
            self._account(feedbacks, surprising, drafting)

    def _learn(self, feedbacks: Mapping[str, StepFeedback]) -> set[str]:
        """The table for all, then the correction of each; requests that did far better than was expected of them."""
        verified = [(request, f.verdicts) for request, f in feedbacks.items() if f.verdicts.taken]
        if not verified:
            return set()
        log_probs, depths, taken = (
            np.concatenate(column) for column in zip(*(verdicts for _, verdicts in verified), strict=True)
        )
        owners = np.repeat(np.arange(len(verified)), [len(verdicts.taken) for _, verdicts in verified])
        sums = self.survival.learn(probabilities_of(log_probs), depths, taken, owners, len(verified))
        surprising = set()
        for (request, _), expected, went_on in zip(verified, *(column.tolist() for column in sums), strict=True):
            signal = self.signal(request)
            if went_on > _SURPRISE * signal.correction * expected:
                surprising.add(request)
            signal.expected = signal.expected * _FADE_REQUEST + expected
            signal.taken = signal.taken * _FADE_REQUEST + went_on
        return surprising

    def _account(self, feedbacks: Mapping[str, StepFeedback], surprising: set[str], drafting: Drafting | None) -> None:
        """Tokens and modelled time of the step; which probes ask for another one at once."""
        requests, nodes = len(feedbacks), sum(f.drafted_nodes for f in feedbacks.values())
        step = self.costs.of_requests(requests)
        verifying = step(requests + nodes)
        seconds = verifying + (drafting.seconds if drafting else 0.0)
        self._emitted = self._emitted * _FADE_RATE + requests + sum(f.accepted for f in feedbacks.values())
        plain = seconds * self._plain_rate(requests)
        self._plain = self._plain * _FADE_RATE + plain
        self.credit = min(PROBE_CREDIT, self.credit + PROBE_SHARE * plain / requests)
        if not isinstance(drafting, _CostAware) or not surprising:
            return
        share = drafting.seconds / max(1, sum(drafting.drafts))
        row = (verifying - step(requests)) / max(1, nodes)
        for request in surprising & drafting.probed:
            signal, feedback = self.signal(request), feedbacks[request]
            if feedback.accepted > drafting.rate * (share + row * feedback.drafted_nodes):
                signal.wait, signal.pause = 0, 1


class _CostAware(Drafting):
    """One step: which requests draft, which nodes are expanded, which are verified.

    Attributes:
        rate: price of time, tokens a second.
        seconds: modelled time of the head in this step.
        probed: requests that draft to see whether it pays again.

    """

    def __init__(
        self,
        policy: CostAwarePolicy,
        requests: Sequence[str],
        signals: list[CostSignal],
        decoding: np.ndarray,
        rows: Sequence[int] | None,
    ) -> None:
        self._policy = policy
        self._costs = policy.costs
        self._survival = policy.survival
        self._requests = int(np.count_nonzero(decoding))
        self._step = policy.costs.of_requests(self._requests)
        self.rate = policy.rate(self._requests) if self._requests else 0.0
        self.seconds = 0.0
        self._correction = np.array([signal.correction for signal in signals])
        self._probes = np.zeros(len(signals), dtype=bool)
        first_rows = decoding.astype(np.int64) if rows is None else np.array(rows, dtype=np.int64)
        gains = self._choose(signals, decoding, first_rows)
        super().__init__(self._drafts.tolist())
        self.probed = {requests[b] for b in np.flatnonzero(self._probes).tolist()}
        self.reasons = {"rate": self.rate, "corrections": self._correction.tolist(), "gains": gains.tolist()}

    def _choose(self, signals: list[CostSignal], decoding: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Set which requests draft; their expected gains."""
        costs, survival = self._costs, self._survival
        gains = np.zeros(len(signals))
        chosen = decoding
        base_rows = int(rows[~decoding].sum())
        for _ in range(2):  # the second time with the shares of those that were chosen
            sharing = int(np.count_nonzero(chosen))
            if not sharing:
                break
            row = (self._step(self._requests + sharing) - self._step(self._requests)) / sharing
            gains[decoding] = choice.gain_of_drafting(
                survival.table,
                survival.children,
                survival.best_child,
                self._correction[decoding],
                self.rate * row,
                self.rate * costs.level(sharing) / sharing,
                self._policy.shape.depth,
            )
            chosen = np.zeros_like(decoding)
            chosen[decoding] = choice.requests_to_draft(
                gains[decoding], rows[decoding], base_rows, self.rate, costs.first
            )
            if np.count_nonzero(chosen) == sharing:
                break
        self._probe(signals, decoding, chosen, rows)
        self._correction[self._probes] = 1.0  # as if it were new, or it would not draft anything
        self._drafts = chosen | self._probes
        if self._drafts.any():
            drafted = int(rows[self._drafts].sum())
            self.seconds += costs.first(base_rows + drafted) - (costs.first(base_rows) if base_rows else 0.0)
        return gains

    def _probe(self, signals: list[CostSignal], decoding: np.ndarray, chosen: np.ndarray, rows: np.ndarray) -> None:
        """Set which requests are probed: those that it is time for, the longest overdue first, as credit lasts."""
        costs, policy = self._costs, self._policy
        for b in np.flatnonzero(decoding).tolist():
            signals[b].count_down(bool(chosen[b]))
        due = [b for b in np.flatnonzero(decoding & ~chosen).tolist() if signals[b].wait < 0]
        if not due or not self._could_pay():
            return
        passing = int(rows[~decoding | chosen].sum())
        for b in sorted(due, key=lambda b: signals[b].wait):
            if policy.credit <= 0:
                break
            signals[b].probe()
            self._probes[b] = True
            before, passing = passing, passing + int(rows[b])
            seconds = costs.first(passing) - (costs.first(before) if before else 0.0)
            seconds += self._step(self._requests + 1) - self._step(self._requests)
            policy.credit -= seconds / self._step(self._requests)

    def _could_pay(self) -> bool:
        """Whether drafts as good as any would pay, for one request or for all of them together."""
        costs, step, requests = self._costs, self._step, self._requests
        return any(
            choice.gain_of_a_chain(
                BEST_ACCEPTANCE,
                self.rate * (step(requests + sharing) - step(requests)) / sharing,
                self.rate * costs.level(sharing) / sharing,
                self._policy.shape.depth,
            )
            > self.rate * costs.first(sharing) / sharing
            for sharing in {1, requests}
        )

    def bounds(self, confidences: Sequence[float]) -> list[TreeShape]:
        return [self._policy.shape if drafts else NO_TREE for drafts in self.drafts]

    def values(self, log_probs: np.ndarray, owners: np.ndarray, depth: int) -> np.ndarray:
        self._depth = depth
        probabilities = probabilities_of(log_probs)
        self._survival.look(probabilities, depth)
        taken = self._survival.g(probabilities, depth) * self._correction[owners, None]
        return np.log(np.minimum(taken, MOST)).astype(np.float32)

    def worth(self) -> Worth:
        return Worth(KNOTS, self._survival.table, self._correction, MOST)

    def expand(self, frontiers: Sequence[np.ndarray], candidates: Sequence[np.ndarray]) -> list[int]:
        sizes = [len(values) for values in frontiers]
        growing = sum(size > 0 for size in sizes)
        if not growing:
            return sizes
        survival, level = self._survival, level_of(self._depth + 1)
        price = choice.price_of_a_row(candidates, self._requests, self.rate, self._step, growing)
        gains = choice.gain_of_children(
            np.exp(np.concatenate(frontiers)),
            survival.table[level],
            survival.children[level],
            np.repeat(self._correction, sizes),
            price,
        )
        counts = choice.nodes_to_expand(gains, sizes, self.rate, self._costs.level)
        if any(counts):
            self.seconds += self._costs.level(sum(counts))
        return counts

    def keep(self, candidates: Sequence[np.ndarray]) -> list[int]:
        return choice.nodes_to_keep(
            candidates, self._requests, self.rate, self._step, self._probes if self._probes.any() else None
        )
