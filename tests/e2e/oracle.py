"""Drafts that are worth testing with: random trees that hide the true continuation among wrong siblings."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from adaptivespec_vllm.types import DraftTree, TreeShape
from tests.e2e.conftest import generate


def runner_of(llm: Any) -> Any:
    """The model runner of an in-process ``LLM``."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


class Oracle:
    """Replaces the trees that a runner drafts.

    Args:
        runner: the runner of an in-process engine.
        truth: the tokens of plain decoding, by prompt.
        seed: of the random trees.
        max_nodes: nodes of a tree, at most.
        max_depth: levels of a tree, at most.
        wrong: token ids of wrong siblings.

    """

    def __init__(
        self,
        runner: Any,
        truth: dict[tuple[int, ...], list[int]],
        seed: int = 0,
        max_nodes: int = 12,
        max_depth: int = 6,
        wrong: Sequence[int] = range(3, 512),
    ) -> None:
        self._runner = runner
        self._truth = truth
        self._random = random.Random(seed)
        self._max_nodes, self._max_depth = max_nodes, max_depth
        self._wrong = wrong
        self.hidden_lengths: list[int] = []
        self._stock = runner.drafter._draft
        runner.drafter._draft = self._draft

    def remove(self) -> None:
        """Give the runner its own drafting back."""
        self._runner.drafter._draft = self._stock

    def _draft(self, roots: list[int], block_table: torch.Tensor) -> list[list[int]]:
        runner = self._runner
        trees = []
        for b, (req_id, sampled) in enumerate(zip(runner.input_batch.req_ids, runner.sampled_requests(), strict=True)):
            state = runner.requests[req_id]
            shape = TreeShape(self._max_depth, self._max_nodes, self._random.randint(0, self._max_nodes))
            shape = runner.drafter._fit(shape, roots[b])
            if not sampled or not shape.nodes:
                trees.append(DraftTree([], [], roots[b]))
                continue
            future = self._truth[tuple(state.prompt_token_ids)][len(state.output_token_ids) :]
            trees.append(self._tree(future, shape, roots[b]))
        return runner.keep_trees(trees)

    def _tree(self, future: list[int], shape: TreeShape, root_position: int) -> DraftTree:
        rng = self._random
        hidden = rng.randint(0, min(len(future), shape.depth, shape.nodes))
        self.hidden_lengths.append(hidden)
        tokens: list[int] = []
        parents: list[int] = []
        depths = [0]
        true_rows = [0]  # rows of the true path found so far
        children: dict[int, set[int]] = {}

        def add(parent: int, token: int) -> None:
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            children.setdefault(parent, set()).add(token)

        while len(tokens) < shape.nodes:
            missing = hidden - (len(true_rows) - 1)
            if missing and (rng.random() < 0.4 or shape.nodes - len(tokens) == missing):
                add(true_rows[-1], future[len(true_rows) - 1])
                true_rows.append(len(tokens))
                continue
            parent = rng.choice([row for row in range(len(depths)) if depths[row] < shape.depth])
            token = rng.choice(self._wrong)
            # Wrong siblings only: the hidden length is what must be accepted, no less and no more.
            depth = depths[parent]
            is_true = parent in true_rows and depth < len(future) and token == future[depth]
            if token not in children.get(parent, set()) and not is_true:
                add(parent, token)
        return DraftTree(tokens, parents, root_position, confidence=0.5, shape=shape)


@contextmanager
def hiding(llm: Any, truth: dict, **oracle: Any) -> Iterator[dict[str, Any]]:
    """While it lasts, an engine drafts trees that hide truths; afterwards the worker's statistics of it are there."""
    drafts = Oracle(runner_of(llm), truth, **oracle)
    llm.collective_rpc("adaptivespec_stats")
    stats: dict[str, Any] = {}
    try:
        yield stats
    finally:
        drafts.remove()
    stats.update(llm.collective_rpc("adaptivespec_stats")[0])


def decode_with_oracle(
    llm: Any, prompts: list, truth: dict, params: Any, **oracle: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Decode with hidden truths; the tokens, and the worker's statistics of these requests alone."""
    with hiding(llm, truth, **oracle) as stats:
        tokens = generate(llm, prompts, params)
    return tokens, stats
