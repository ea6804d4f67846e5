"""What a policy learns of a step, and what of it is counted; for either model runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from adaptivespec_vllm.config import AdaptiveSpecConfig, LossyConfig
from adaptivespec_vllm.engine.v1.stats import WorkerStats
from adaptivespec_vllm.policy.base import Drafting, TreePolicy
from adaptivespec_vllm.policy.guard import held_back_by
from adaptivespec_vllm.types import StepFeedback


def observe(
    policy: TreePolicy,
    feedbacks: Mapping[str, StepFeedback],
    margin_of: Callable[[str], LossyConfig | None],
    settings: AdaptiveSpecConfig,
    stats: WorkerStats,
    drafting: Drafting | None = None,
) -> None:
    """Tell the policy what became of each request's tree, and count breakers and guards that trip by it.

    Args:
        policy: learns.
        feedbacks: by request.
        margin_of: the lossy rule of a request.
        settings: of the server.
        stats: gets the counts.
        drafting: that gave the trees; None is the one begun last.

    """

    def trips(request: str) -> tuple[bool, str | None]:
        """Whether the breaker is open, and the guard that holds the request's margin back."""
        signal, margin = policy.signal(request), margin_of(request)
        open_breaker = signal.tripped and settings.tree.policy == "adaptive"  # no other policy minds it
        return open_breaker, margin and held_back_by(margin, settings.guard, signal)

    # Nothing trips in a step without drafts.
    before = {request: trips(request) for request, feedback in feedbacks.items() if feedback.drafted_nodes}
    policy.observe(feedbacks, drafting)
    for request, (breaker, guard) in before.items():
        opened, held_back = trips(request)
        stats.breaker_trips += opened and not breaker
        if held_back is not None and guard is None:
            stats.guard_trips[held_back] += 1
