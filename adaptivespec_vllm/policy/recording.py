"""A policy's calls as events, and the same calls made again.

Everything that a policy decides follows from the calls it gets, so a log of the calls is enough to compute every
decision again on a fresh policy. An event is plain values: the call's name, its arguments, its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from adaptivespec_vllm.policy.base import Drafting, NoDrafting, TreePolicy
from adaptivespec_vllm.policy.costs import Costs
from adaptivespec_vllm.types import RequestSignal, StepFeedback, TreeShape, Verdicts, Worth

NOT_BEGUN = 0
"""Number of a drafting that no policy began: a step in which nothing was asked."""

Event = dict[str, Any]
"""``{"call": name, "arguments": {...}, "result": ...}``, ready for JSON."""

TOLERANCE = 1e-4
"""Relative difference of two numbers that count as the same: another processor rounds otherwise. Counts are exact."""


class Recorded(TreePolicy):
    """A policy that writes down every call it gets.

    Args:
        policy: decides.
        write: takes one event.

    """

    def __init__(self, policy: TreePolicy, write: Callable[[Event], object]) -> None:
        self._policy = policy
        self._write = write
        self.config = policy.config
        self.signals = policy.signals
        self._begun = 0
        self._record("start", {"costs": policy.costs and policy.costs.to_dict()})

    @property
    def costs(self) -> Costs | None:
        return self._policy.costs

    @costs.setter
    def costs(self, costs: Costs | None) -> None:
        self._policy.costs = costs
        self._record("costs", {"costs": costs and costs.to_dict()})

    def signal(self, request: str) -> RequestSignal:
        return self._policy.signal(request)

    def forget(self, request: str) -> None:
        self._policy.forget(request)
        self._record("forget", {"request": request})

    def begin(self, requests: Sequence[str], decoding: Sequence[bool], rows: Sequence[int] | None = None) -> Drafting:
        drafting = self._policy.begin(requests, decoding, rows)
        arguments = {
            "requests": list(requests),
            "decoding": list(decoding),
            "rows": None if rows is None else list(rows),
        }
        self._record("begin", arguments, {"drafts": drafting.drafts, "reasons": drafting.reasons})
        self._begun += 1
        return _RecordedDrafting(drafting, self._record, self._begun)

    def observe(self, feedbacks: Mapping[str, StepFeedback], drafting: Drafting | None = None) -> None:
        arguments: dict[str, Any] = {
            "feedbacks": {request: asdict(feedback) for request, feedback in feedbacks.items()}
        }
        if isinstance(drafting, _RecordedDrafting):
            arguments["drafting"], drafting = drafting.number, drafting.recorded
        elif drafting is not None:
            arguments["drafting"] = NOT_BEGUN
        self._policy.observe(feedbacks, drafting)
        self._record("observe", arguments)

    def _record(self, call: str, arguments: dict[str, Any], result: Any = None) -> None:
        self._write({"call": call, "arguments": arguments, "result": result})


class _RecordedDrafting(Drafting):
    def __init__(self, drafting: Drafting, record: Callable[[str, dict[str, Any], Any], None], number: int) -> None:
        self.recorded = self._drafting = drafting
        self.number = number
        self._record = record
        self.drafts = drafting.drafts
        self.reasons = drafting.reasons
        self.beam = drafting.beam

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._drafting.seconds

    def bounds(self, confidences: Sequence[float]) -> list[TreeShape]:
        shapes = self._drafting.bounds(confidences)
        self.reasons = self._drafting.reasons
        result = {"shapes": [list(shape) for shape in shapes], "reasons": self.reasons}
        self._record("bounds", {"confidences": list(confidences)}, result)
        return shapes

    def values(self, log_probs: np.ndarray, owners: np.ndarray, depth: int) -> np.ndarray:
        values = self._drafting.values(log_probs, owners, depth)
        arguments = {"log_probs": log_probs.tolist(), "owners": owners.tolist(), "depth": depth}
        self._record("values", arguments, values.tolist())
        return values

    def worth(self) -> Worth | None:
        return self._drafting.worth()

    def expand(self, frontiers: Sequence[np.ndarray], candidates: Sequence[np.ndarray]) -> list[int]:
        counts = self._drafting.expand(frontiers, candidates)
        self._record("expand", {"frontiers": _lists(frontiers), "candidates": _lists(candidates)}, counts)
        return counts

    def keep(self, candidates: Sequence[np.ndarray]) -> list[int]:
        counts = self._drafting.keep(candidates)
        self._record("keep", {"candidates": _lists(candidates)}, counts)
        return counts


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A logged result that comes out differently when computed again."""

    index: int
    call: str
    logged: Any
    computed: Any


def replay(events: Iterable[Event], make: Callable[[Costs | None], TreePolicy]) -> list[Mismatch]:
    """Make logged calls again; the events whose results differ, in the order of the log.

    Args:
        events: as they were written; each ``start`` among them begins with a fresh policy.
        make: that policy, with the costs that the log holds.

    """
    mismatches = []
    again: list[Event] = []
    policy: TreePolicy | None = None
    drafting: Drafting | None = None
    begun: dict[int, Drafting] = {}
    for index, event in enumerate(events):
        call, arguments = event["call"], event["arguments"]
        again.clear()
        if call == "start":
            policy = Recorded(make(_costs(arguments)), again.append)
            begun = {NOT_BEGUN: NoDrafting([])}
        elif policy is None:
            raise ValueError(f"event {index}: {call!r} before any 'start'")
        elif call == "costs":
            policy.costs = _costs(arguments)
        elif call == "forget":
            policy.forget(arguments["request"])
        elif call == "begin":
            drafting = begun[len(begun)] = policy.begin(**arguments)
        elif call == "observe":
            feedbacks = {request: _feedback(values) for request, values in arguments["feedbacks"].items()}
            policy.observe(feedbacks, begun[arguments["drafting"]] if "drafting" in arguments else None)
        else:
            assert drafting is not None
            getattr(drafting, call)(**_arrays(arguments))
        computed = json.loads(json.dumps(again[-1]["result"]))
        if not _same(event["result"], computed):
            mismatches.append(Mismatch(index, call, event["result"], computed))
    return mismatches


def _costs(arguments: Mapping[str, Any]) -> Costs | None:
    return None if arguments["costs"] is None else Costs.from_dict(arguments["costs"])


def _lists(arrays: Sequence[np.ndarray]) -> list[list[float]]:
    return [array.tolist() for array in arrays]


def _arrays(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a drafting's call as it got them."""
    arrays: dict[str, Callable[[Any], Any]] = {
        "log_probs": lambda rows: np.array(rows, dtype=np.float32),
        "owners": lambda rows: np.array(rows, dtype=np.int64),
        "frontiers": lambda lists: [np.array(values, dtype=np.float32) for values in lists],
        "candidates": lambda lists: [np.array(values, dtype=np.float32) for values in lists],
    }
    return {name: arrays[name](value) if name in arrays else value for name, value in arguments.items()}


def _feedback(values: Mapping[str, Any]) -> StepFeedback:
    return StepFeedback(**{**values, "verdicts": Verdicts(*values["verdicts"])})


def _same(logged: Any, computed: Any) -> bool:
    if isinstance(logged, dict) and isinstance(computed, dict):
        return logged.keys() == computed.keys() and all(_same(logged[key], computed[key]) for key in logged)
    if isinstance(logged, list) and isinstance(computed, list):
        return len(logged) == len(computed) and all(map(_same, logged, computed))
    if isinstance(logged, float) and isinstance(computed, float):
        return bool(np.isclose(logged, computed, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
    return type(logged) is type(computed) and logged == computed
