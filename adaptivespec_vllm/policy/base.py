"""Contract of a tree policy.

A policy is told before a step which requests there are, steers the drafting of their trees while they grow, and is
told after the walk what came of each. A step in order::

    drafting = policy.begin(requests, decoding)     which of them draft at all: drafting.drafts
    drafting.bounds(confidences)                    after the head's first pass: the largest tree of each
    drafting.values(log_probs, owners, depth)       once a level: what its candidates are worth
    drafting.expand(frontiers, candidates)          once a level: how many nodes the head runs over next
    drafting.keep(candidates)                       how many nodes are verified
    policy.observe(feedbacks)                       after the target's walk
    policy.forget(request)                          when a request ends

Everything follows from these calls and their order: the same calls give the same trees, on any rank and in a replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from adaptivespec_vllm.config import AdaptiveSpecConfig, TreeConfig
from adaptivespec_vllm.policy import signal as signals_
from adaptivespec_vllm.policy.costs import Costs
from adaptivespec_vllm.types import NO_TREE, RequestSignal, StepFeedback, TreeShape, Worth


class Drafting(ABC):
    """The drafting of one step, of all B requests of the batch, as a policy steers it.

    Attributes:
        drafts: ``[B]`` which requests draft at all. The others need no pass of the head.
        reasons: plain numbers behind the decisions so far, by name; for the log.
        seconds: modelled time of the head in this step, so far; of a policy that knows costs.
        beam: nodes that are expanded at most, on one level or on all of them; None is the width of the shape on each
            level.

    """

    seconds: float = 0.0
    beam: int | None = None

    def __init__(self, drafts: list[bool]) -> None:
        self.drafts = drafts
        self.reasons: dict[str, Any] = {}

    @abstractmethod
    def bounds(self, confidences: Sequence[float]) -> list[TreeShape]:
        """The largest tree of each request; ``NO_TREE`` for those that do not draft.

        Args:
            confidences: ``[B]`` the draft's probability of its own first choice at each root (of requests that do not
                draft: anything).

        """

    def values(self, log_probs: np.ndarray, owners: np.ndarray, depth: int) -> np.ndarray:
        """What each candidate of a level is worth, given that its parent is reached.

        Args:
            log_probs: ``float32 [R, k]`` conditional draft log-probabilities of the k best children of R nodes.
            owners: ``int64 [R]`` request of each node, ascending.
            depth: of the children, 1 below the root.

        Returns:
            ``float32 [R, k]``, at most 0 and in the order of ``log_probs``: what a node is worth is the sum along its
            path, so a child is never worth more than its parent.

        """
        return log_probs

    def worth(self) -> Worth | None:
        """What :meth:`values` computes, as numbers that a device can use; None where it gives what it is given."""
        return None

    @abstractmethod
    def expand(self, frontiers: Sequence[np.ndarray], candidates: Sequence[np.ndarray]) -> list[int]:
        """How many of each request's frontier nodes, from the first, the head runs over next.

        Args:
            frontiers: B times the path values of the nodes that may be expanded, descending.
            candidates: B times the path values of all nodes so far that fit into the bounds, descending.

        """

    @abstractmethod
    def keep(self, candidates: Sequence[np.ndarray]) -> list[int]:
        """How many of each request's candidates, from the first, are verified; argument as in :meth:`expand`."""


class NoDrafting(Drafting):
    """A step in which no request drafts."""

    def bounds(self, confidences: Sequence[float]) -> list[TreeShape]:
        return [NO_TREE] * len(self.drafts)

    def expand(self, frontiers: Sequence[np.ndarray], candidates: Sequence[np.ndarray]) -> list[int]:
        return [0] * len(self.drafts)

    def keep(self, candidates: Sequence[np.ndarray]) -> list[int]:
        return [0] * len(self.drafts)


class TreePolicy(ABC):
    """Decides how much is drafted; see the module's own text."""

    Tree: ClassVar[type[TreeConfig]]
    """The keys of ``tree`` in the configuration."""

    costs: Costs | None = None
    """What a step costs here; None for a policy that does not ask."""

    def __init__(self, config: AdaptiveSpecConfig) -> None:
        self.config = config
        self.signals: dict[str, RequestSignal] = {}
        """Rolling state, by request."""

    @classmethod
    def make(cls, config: AdaptiveSpecConfig, costs: Costs | None) -> TreePolicy:
        """The policy of a configuration; ``costs`` as in :func:`policy.make_policy`."""
        return cls(config)

    def signal(self, request: str) -> RequestSignal:
        """The rolling state of a request, which begins with the first question."""
        if request not in self.signals:
            self.signals[request] = self.new_signal()
        return self.signals[request]

    def new_signal(self) -> RequestSignal:
        """The signal of a request that has not decoded yet."""
        return RequestSignal(acceptance=self.config.signal.initial)

    def forget(self, request: str) -> None:
        """The request has ended."""
        self.signals.pop(request, None)

    @abstractmethod
    def begin(self, requests: Sequence[str], decoding: Sequence[bool], rows: Sequence[int] | None = None) -> Drafting:
        """Start the drafting of a step.

        Args:
            requests: ids of the B requests of the batch.
            decoding: ``[B]`` whether each one emits tokens in this step (False: its prompt is not read to its end).
            rows: ``[B]`` rows that each one takes in the head's first pass; None is one row each. Those of requests
                that do not decode are run in any case.

        """

    def observe(self, feedbacks: Mapping[str, StepFeedback], drafting: Drafting | None = None) -> None:
        """What a step gave.

        Args:
            feedbacks: of every request that emitted tokens.
            drafting: that gave the trees; None is the one begun last. Where steps are drafted before the ones before
                them are known, it is another one.

        """
        for request, feedback in feedbacks.items():
            signals_.observe(self.signal(request), feedback, self.config.signal)
