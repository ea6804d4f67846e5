"""Drafts that are worth testing with: random trees that hide the true continuation among wrong siblings."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from adaptivespec_vllm.draft import NO_TOKEN, TreeGrid, grid_of
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
        self._drafter, self._name, mine = self._place()
        self._stock = getattr(self._drafter, self._name)
        setattr(self._drafter, self._name, mine)

    def _place(self) -> tuple[Any, str, Any]:
        """The method that drafts, and what takes its place."""
        if hasattr(self._runner, "speculator"):
            return self._runner.speculator, "draft", self._draft_grid
        return self._runner.drafter, "_draft", self._draft

    def remove(self) -> None:
        """Give the runner its own drafting back."""
        setattr(self._drafter, self._name, self._stock)

    def _draft(self, roots: list[int], block_table: torch.Tensor) -> list[list[int]]:
        runner = self._runner
        trees = []
        for b, (req_id, sampled) in enumerate(zip(runner.input_batch.req_ids, runner.sampled_requests(), strict=True)):
            state = runner.requests[req_id]
            bound = runner.drafter._fit(self.bound(), roots[b])
            text = [*state.prompt_token_ids, *state.output_token_ids]
            drafts = sampled and bound.nodes
            tree = self.tree(text, len(state.prompt_token_ids), bound) if drafts else DraftTree([], [], 0)
            trees.append(replace(tree, root_position=roots[b]))
        return runner.keep_trees(trees)

    def bound(self) -> TreeShape:
        """The largest tree of a request in a step."""
        return TreeShape(self._max_depth, self._max_nodes, self._random.randint(0, self._max_nodes))

    def tree(self, text: list[int], prompt: int, bound: TreeShape) -> DraftTree:
        """The tree behind a text whose first ``prompt`` tokens are its prompt."""
        return self._tree(self._future(text, prompt), bound)

    def _future(self, text: list[int], prompt: int) -> list[int]:
        return self._truth[tuple(text[:prompt])][len(text) - prompt :]

    def _draft_grid(self, input_batch: Any, num_sampled: torch.Tensor, roots: torch.Tensor) -> TreeGrid:
        """The same on the V2 runner, which keeps its requests in slots on the device."""
        runner, states = self._runner, self._runner.req_states
        trees = []
        for slot, sampled, root in zip(input_batch.idx_mapping_np, num_sampled.tolist(), roots.tolist(), strict=True):
            bound, room = self.bound(), runner.max_model_len - root - 2
            bound = TreeShape(min(bound.depth, bound.nodes, room), bound.width, min(bound.nodes, room))
            if not sampled or bound.depth <= 0:
                trees.append(DraftTree([], [], root))
                continue
            text = states.all_token_ids.gpu[slot, : root + 1].tolist()
            prompt = int(states.prompt_len.np[slot])
            if runner.limits.is_chain[slot]:
                trees.append(self._chain(self._future(text, prompt), bound.depth))
            else:
                trees.append(self.tree(text, prompt, bound))
        return grid(trees, runner.num_speculative_steps)

    def _chain(self, future: list[int], depth: int) -> DraftTree:
        """The truth, up to somewhere, and wrong tokens behind it."""
        hidden = self._random.randint(0, min(len(future), depth))
        wrong = [self._random.choice(self._wrong) for _ in range(depth - hidden)]
        return DraftTree.chain([*future[:hidden], *wrong], 0)

    def _tree(self, future: list[int], shape: TreeShape) -> DraftTree:
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
        return DraftTree(tokens, parents, 0, confidence=0.5, shape=shape)


def grid(trees: Sequence[DraftTree], nodes: int) -> TreeGrid:
    """Trees as the V2 runner keeps them."""

    def padded(rows: list[list], value: Any) -> torch.Tensor:
        return torch.tensor([[*row, *[value] * (nodes - len(row))] for row in rows])

    log_probs = torch.zeros(len(trees), nodes)
    tokens, parents = padded([t.tokens for t in trees], NO_TOKEN), padded([t.parents for t in trees], 0)
    return grid_of(tokens, parents, log_probs, levels=nodes)


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
