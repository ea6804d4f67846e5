"""What a V2 step hands out: vLLM's output, which is read once the device is done, and with it what became of the trees.

The host learns of a step when vLLM does, so policies decide from what the step before gave, or the one before that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream

from adaptivespec_vllm.engine.metrics.carry import TreeRunnerOutput
from adaptivespec_vllm.engine.v1.stats import WorkerStats
from adaptivespec_vllm.engine.v2.step import TreeStep
from adaptivespec_vllm.policy.base import Drafting
from adaptivespec_vllm.types import NOTHING_DRAFTED, DraftTree, StepFeedback


@dataclass(slots=True)
class Promoted:
    """What promotions of a request came to since it began."""

    tokens: int = 0
    nats: float = 0.0


@dataclass
class News:
    """What became of the trees of a step.

    Attributes:
        counted: of the step.
        feedbacks: by request.
        drafting: the policy's view of the step that drafted the trees.

    """

    counted: WorkerStats
    feedbacks: dict[str, StepFeedback]
    drafting: Drafting


class Verified:
    """What became of trees, from the thread that reads outputs to the one that drafts."""

    def __init__(self) -> None:
        self._news: deque[News] = deque()
        self.promoted: dict[str, Promoted] = {}

    def put(self, news: News) -> None:
        self._news.append(news)

    def take(self) -> list[News]:
        """Everything that is new, in the order of the steps."""
        return [self._news.popleft() for _ in range(len(self._news))]


class VerifiedTrees:
    """The verified trees of a step on their way to the host, from before the step drafts: as vLLM's own output is.

    Args:
        step: its result is known on the device, if it had drafts.
        streams: the one to copy on, and the one that the step runs on.

    """

    def __init__(self, step: TreeStep, streams: tuple[Any, Any]) -> None:
        self.requests = step.requests
        self._start = step.start
        self._drafting = step.drafting
        self._step = step  # its tensors must not be freed before they are copied
        copy_stream, main_stream = streams
        self._copied = torch.cuda.Event(blocking=True)
        with stream(copy_stream, main_stream):
            copy_stream.wait_stream(main_stream)
            self._arrays = {name: async_copy_to_np(tensor) for name, tensor in _tensors(step).items()}
            self._copied.record(copy_stream)

    def news(self, counted: WorkerStats, promoted: dict[str, Promoted]) -> News:
        """Wait for the copies, as vLLM does; what each request that emitted tokens learns, counted into ``counted``."""
        self._copied.synchronize()
        found: dict[str, StepFeedback] = {}
        lists = {name: array.tolist() for name, array in self._arrays.items()}
        counted.engine_steps += 1
        for b, request in enumerate(self.requests):
            if not lists["emitting"][b]:
                continue
            if "tokens" not in lists:
                counted.record(DraftTree([], [], 0), 0, 0, 0.0)
                found[request] = NOTHING_DRAFTED
                continue
            tree = self._tree(b, lists)
            accepted, promotions, regret = (lists[name][b] for name in ("lengths", "promotions", "regrets"))
            depth = counted.record(tree, accepted, promotions, regret)
            if promotions:
                of_request = promoted.setdefault(request, Promoted())
                of_request.tokens += promotions
                of_request.nats += regret
            verdicts = tree.verdicts(lists["paths"][b][:accepted])
            found[request] = (
                StepFeedback(tree.confidence, depth, len(tree), accepted, promotions, regret, verdicts)
                if len(tree)
                else NOTHING_DRAFTED
            )
        counted.plain_engine_steps += not any(feedback.drafted_nodes for feedback in found.values())
        return News(counted, found, self._drafting)

    def _tree(self, b: int, lists: Mapping[str, Any]) -> DraftTree:
        first, end = int(self._start[b]) + 1, int(self._start[b + 1])
        nodes = sum(token >= 0 for token in lists["tokens"][first:end])
        kept = slice(first, first + nodes)
        log_probs = lists["log_probs"][kept]
        return DraftTree(
            tokens=lists["tokens"][kept],
            parents=lists["parents"][kept],
            root_position=lists["positions"][first - 1],
            confidence=float(np.exp(log_probs[0])) if nodes else 0.0,
            log_probs=log_probs,
        )


class TreeOutput(AsyncModelRunnerOutput):
    """vLLM's output of a step and the trees that were verified in it.

    Args:
        stock: vLLM's own.
        trees: what was verified.
        verified: where the news goes.
        counted: what was counted besides; the trees are counted into it.
        records_requests: whether a request's record is asked for.
        planned: see ``TreeRunnerOutput``.

    """

    def __init__(
        self,
        stock: Any,
        trees: VerifiedTrees,
        verified: Verified,
        counted: WorkerStats,
        records_requests: bool,
        planned: Mapping[str, int],
    ) -> None:
        self._stock = stock
        self._trees = trees
        self._verified = verified
        self._counted = counted
        self._records_requests = records_requests
        self._planned = planned

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copies, as vLLM does, and count."""
        output = self._stock.get_output()
        promoted = self._verified.promoted
        news = self._trees.news(self._counted, promoted)
        self._verified.put(news)
        told = {
            request: (promoted[request].tokens, promoted[request].nats)
            for request in self._trees.requests
            if self._records_requests and request in promoted
        }
        return TreeRunnerOutput.of(output, news.counted, told, self._planned)

    def get_kv_connector_output(self) -> Any:
        """Of vLLM 0.33 and later, which asks for it where ``get_output`` failed."""
        return self._stock.get_kv_connector_output()


def _tensors(step: TreeStep) -> dict[str, torch.Tensor]:
    assert step.emitting is not None
    result, batch = step.result, step.batch
    if result is None:
        return {"emitting": step.emitting}
    return {
        "emitting": step.emitting,
        "lengths": result.lengths,
        "promotions": result.promotions,
        "regrets": result.regrets,
        "paths": result.paths,
        "tokens": batch.tokens,
        "parents": batch.parents,
        "positions": batch.positions,
        "log_probs": step.log_probs,
    }
