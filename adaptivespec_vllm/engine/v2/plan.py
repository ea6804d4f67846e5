"""How much a V2 step drafts: what the host decides, from what it knows when drafting begins.

That is the outcome of the step before at the latest, with asynchronous scheduling of the one before that. Nothing here
waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from adaptivespec_vllm.config import AdaptiveSpecConfig, LossyConfig
from adaptivespec_vllm.engine.decision_log import DecisionLog
from adaptivespec_vllm.engine.learning import observe
from adaptivespec_vllm.engine.v1.costs import agreed, costs_of
from adaptivespec_vllm.engine.v1.stats import WorkerStats
from adaptivespec_vllm.engine.v1.step_times import StepTimes
from adaptivespec_vllm.engine.v2.forecast import Forecast
from adaptivespec_vllm.engine.v2.limits import RequestLimits
from adaptivespec_vllm.engine.v2.output import News, Verified
from adaptivespec_vllm.policy import make_policy
from adaptivespec_vllm.policy.base import Drafting, NoDrafting, TreePolicy
from adaptivespec_vllm.policy.costs import Costs
from adaptivespec_vllm.policy.recording import Recorded
from adaptivespec_vllm.types import TreeShape

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v2.runner import TreeModelRunner

UNKNOWN_CONFIDENCE = 0.5
"""Of a request whose first tree is not verified yet."""


@dataclass(frozen=True)
class Plan:
    """What a step drafts.

    Attributes:
        drafting: the policy's view of it.
        shapes: ``[B]`` the largest tree of each request of the batch.
        decoding: ``[B]`` requests that emit tokens.

    """

    drafting: Drafting
    shapes: list[TreeShape]
    decoding: list[bool]

    @property
    def levels(self) -> int:
        """Of the deepest tree; 0 where nobody drafts."""
        return max(shape.depth for shape in self.shapes)


class Planner:
    """Decides for one worker.

    Args:
        limits: what each request may draft.
        asynchronous: the scheduler plans a step before the one before it has been read.
        decision_log: where the policy's calls are written; None is nowhere.

    """

    def __init__(self, limits: RequestLimits, asynchronous: bool, decision_log: DecisionLog | None) -> None:
        self._limits = limits
        self._asynchronous = asynchronous
        self._decision_log = decision_log
        self.alive: set[str] = set()
        """Requests that have begun and not ended; a preempted one has no slot."""
        self.verified = Verified()
        self.costs: Costs | None = None
        """What a step costs here, as measured at start; a file in the configuration wins over it."""
        self.planned: dict[str, int] = {}
        """Nodes of the next tree of each request of the last batch, at most, as they were decided now. Asynchronous
        scheduling learns of them a step later, and drafts follow it."""
        self._shapes: dict[str, TreeShape] = {}
        """The same as shapes."""

    def configure(self, settings: AdaptiveSpecConfig) -> None:
        """Use these settings from the next step on."""
        self.settings = settings
        self.policy: TreePolicy = make_policy(settings, self.costs if settings.tree.costs is None else None)
        self.forecast = Forecast() if self.policy.costs is not None else None
        """None for a policy that gives every tree a shape before it grows."""
        self._step_times = StepTimes()
        self._confidences: dict[str, float] = {}
        """The draft's probability of its own first choice, of the last tree of each request that the host knows of."""
        if self._decision_log is not None:
            self.policy = Recorded(self.policy, self._decision_log.write)

    def measure_costs(self, runner: TreeModelRunner) -> None:
        """Tell a policy that asks what a step costs, unless the configuration does."""
        if self.policy.costs is not None and self.settings.tree.costs is None:
            self.policy.costs = self.costs = costs_of(runner)

    @property
    def _decides_by_measured_costs(self) -> bool:
        return self.costs is not None and self.policy.costs is not None and self.settings.tree.costs is None

    def forget(self, request: str) -> None:
        """The request has ended."""
        self.alive.discard(request)
        self.policy.forget(request)
        self.verified.promoted.pop(request, None)
        self._confidences.pop(request, None)
        if self.forecast is not None:
            self.forecast.forget(request)

    # --- time --------------------------------------------------------------------------------------------------

    def begin_step(self, scheduled: dict[str, int]) -> None:
        """A step of so many rows a request begins."""
        residuals = self._step_times.begin(scheduled)
        if residuals is not None and self._decides_by_measured_costs:
            assert self.costs is not None
            residuals = agreed(residuals)
            self.policy.costs = self.costs.corrected(residuals.plain, residuals.drafting)

    def end_step(self, plan: Plan, rows: int) -> None:
        """A step ends in which every request decoded, in so many rows of the target.

        Costs say what it should have taken, unless a request did not want what the policy chose.
        """
        if self._decides_by_measured_costs and plan.drafting.drafts == [shape.depth > 0 for shape in plan.shapes]:
            assert self.costs is not None
            expected = self.costs.target(rows) + plan.drafting.seconds
            self._step_times.end(len(plan.shapes), rows, expected, plan.levels > 0)

    # --- decisions ---------------------------------------------------------------------------------------------

    def learn(self, slots: dict[str, int], stats: WorkerStats) -> list[WorkerStats]:
        """Tell the policy what became of trees, as far as the host knows; the counts of those steps.

        Args:
            slots: of requests that have one.
            stats: gets the counts of breakers and guards.

        """

        def margin(request: str) -> LossyConfig | None:
            slot = slots.get(request)
            return None if slot is None else self._limits.overrides[slot].margin

        news: list[News] = self.verified.take()
        for new in news:
            feedbacks = {request: feedback for request, feedback in new.feedbacks.items() if request in self.alive}
            observe(self.policy, feedbacks, margin, self.settings, stats, new.drafting)
            self._confidences.update({r: f.confidence for r, f in feedbacks.items() if f.drafted_nodes})
        return [new.counted for new in news]

    def plan(self, requests: Sequence[str], slots: np.ndarray, decoding: list[bool], rows: list[int]) -> Plan:
        """What to draft now.

        Args:
            requests: B ids.
            slots: ``[B]``.
            decoding: ``[B]``, whether each one emits tokens in this step.
            rows: ``[B]``, rows of each in the head's first pass.

        """
        wanted = [self._limits.overrides[slot].drafts for slot in slots.tolist()]
        plain = not any(wanted) or (
            self._decides_by_measured_costs and all(decoding) and self._step_times.leaves_out(len(requests))
        )
        drafting = NoDrafting([False] * len(requests)) if plain else self.policy.begin(requests, decoding, rows)
        bounds = drafting.bounds([self._confidences.get(request, UNKNOWN_CONFIDENCE) for request in requests])
        shapes = [self._limits.bound(slot, shape) for slot, shape in zip(slots.tolist(), bounds, strict=True)]
        if self.forecast is not None:
            shapes = self.forecast.sizes(drafting, requests, shapes)
        decided = dict(zip(requests, shapes, strict=True))
        self.planned = {request: shape.nodes for request, shape in decided.items()}
        if self._asynchronous:  # rows of the next step follow the decision of the step before; so do its trees
            shapes = [self._shapes.get(request, shape) for request, shape in decided.items()]
            self._shapes = decided
        return Plan(drafting, shapes, decoding)
