"""What a step costs here, measured once before the first request.

Each part is run over growing numbers of rows, and of a few repeats the fastest counts: what slows a run down is other
programs. The target runs without a batch's metadata, so the attention of its tree rows is measured beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

from adaptivespec_vllm import __version__, ops, runtime
from adaptivespec_vllm.attention import TreePlaces, TreeRows
from adaptivespec_vllm.draft import expand_trees, scratch_rows_needed
from adaptivespec_vllm.engine import cost_cache, seams
from adaptivespec_vllm.policy.costs import Costs, CostTable
from adaptivespec_vllm.types import TreeShape

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v1.runner import TreeModelRunner

T = TypeVar("T")

logger = init_logger("vllm.adaptivespec")  # below vLLM's own, so that it is shown

ROWS = (*range(1, 17), 20, 24, 32, 48, 64, 96, 128, 192, 256)
REPEATS = 3
MAX_SECONDS = 4.0
"""Of one table; larger numbers of rows are left to the last slope when it is used up."""

CONTEXT = 256
"""Tokens before the rows whose attention is measured."""

_WIDTH = 4


def costs_of(runner: TreeModelRunner) -> Costs:
    """Measured costs of a runner that is ready for requests; those of an earlier start where nothing has changed.

    The first rank looks, keeps and reports; measuring is done by all ranks or by none.
    """
    first_rank, facts = get_tp_group().is_first_rank, facts_of(runner)
    costs = agreed(cost_cache.look_up(facts) if first_rank else None)
    if costs is None:
        started = time.perf_counter()
        costs = agreed(measured_costs(runner))
        if first_rank:
            logger.info("AdaptiveSpec measured the costs of a step in %.1f s", time.perf_counter() - started)
            _keep(facts, costs)
    if first_rank:
        logger.info("AdaptiveSpec costs, milliseconds by rows: %s", describe(costs))
    return costs


def agreed(value: T) -> T:
    """The first rank's value, on all ranks.

    Ranks do not see the same time, and what follows from it must be one decision: they meet in the same passes, over
    the same trees, or wait for each other for ever.
    """
    return get_tp_group().broadcast_object(value, src=0)


def measured_costs(runner: TreeModelRunner) -> Costs:
    """Costs of a runner that is ready for requests, measured now."""
    return runner.measurement(runner).costs()


def facts_of(runner: TreeModelRunner) -> dict[str, Any]:
    """Everything that costs depend on, by name."""
    config = runner.vllm_config
    draft = config.speculative_config.draft_model_config
    facts = {
        "machine": runtime.machine(),
        "device": str(runner.device),
        "threads": torch.get_num_threads(),
        "target": cost_cache.model_name(config.model_config.model),
        "head": cost_cache.model_name(draft.model),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "ranks": config.parallel_config.tensor_parallel_size,
        "rows": _most_rows(runner),
        "packed levels": runner.drafter.head.is_packed,
        "versions": {
            "adaptivespec": __version__,
            "vllm": seams.vllm_version(),
            "torch": str(torch.__version__),
            "ops": ops.describe(),
        },
        "target settings": config.model_config.compute_hash(),
        "head settings": draft.compute_hash(),
        "parallel settings": config.parallel_config.compute_hash(),
        "compilation settings": config.compilation_config.compute_hash(),
    }
    if runner.device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(runner.device), "attention": runner.attention_name}
    facts |= runner.measurement.facts
    if config.lora_config:
        facts["adapters"] = config.lora_config.compute_hash()
    return facts


def _keep(facts: cost_cache.Facts, costs: Costs) -> None:
    """For the next start, unless they are those of a busy machine."""
    if runtime.busy() is not None:
        logger.warning("AdaptiveSpec measured costs while other programs were busy; the next start measures again")
        return
    try:
        cost_cache.keep(facts, costs)
    except OSError as error:
        logger.warning("AdaptiveSpec could not keep measured costs for the next start: %s", error)


def _most_rows(runner: TreeModelRunner) -> int:
    """Rows of the largest step that only decodes."""
    largest = runner.max_num_reqs * (1 + runner.settings.max_nodes)
    return min(largest, runner.max_num_tokens, ROWS[-1])


class _Everything:
    """Steers a tree to its full shape."""

    beam = None

    def values(self, log_probs: np.ndarray, owners: np.ndarray, depth: int) -> np.ndarray:
        return log_probs

    def expand(self, frontiers: Sequence[np.ndarray], candidates: Sequence[np.ndarray]) -> list[int]:
        return [len(values) for values in frontiers]

    def keep(self, candidates: Sequence[np.ndarray]) -> list[int]:
        return [len(values) for values in candidates]


class Measurement:
    """The passes of a step over any number of rows, on made-up input."""

    facts: ClassVar[dict[str, Any]] = {}
    """What costs depend on besides."""

    def __init__(self, runner: TreeModelRunner) -> None:
        self._runner = runner
        self._rows = [rows for rows in ROWS if rows <= _most_rows(runner)]

    @torch.inference_mode()
    def costs(self) -> Costs:
        # Whatever is not compiled yet is compiled now. vLLM's graphs have no guards: one of a single row fits no other.
        self._target(self._rows[-1])
        self._first(self._rows[-1])
        attention, target = self._attention(), self._table(self._target)
        without, with_level = self._table(self._stump), self._table(self._level)
        return Costs(
            target=CostTable((rows, seconds + attention(rows)) for rows, seconds in target.points),
            first=self._table(self._first),
            level=CostTable((rows, max(seconds - without(rows), 0.0)) for rows, seconds in with_level.points),
        )

    def _table(self, run: Callable[[int], object]) -> CostTable:
        points = []
        sync = self._sync
        until = time.perf_counter() + MAX_SECONDS
        for rows in self._rows:
            run(rows)  # warm-up
            sync()
            points.append((rows, min(_seconds(run, rows, sync) for _ in range(REPEATS))))
            if agreed(time.perf_counter() > until):
                break
        return CostTable(points)

    def _sync(self) -> None:
        self._runner._sync_device()

    def _inputs(self, rows: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._runner.input_ids.gpu[:rows], "positions": self._runner.positions[:rows]}

    def _head_layers(self) -> set[str]:
        return {name for group in self._runner.drafter.draft_attn_groups for name in group.layer_names}

    def _target(self, rows: int) -> None:
        runner = self._runner
        with (
            runner.maybe_select_dummy_loras(runner.lora_config, np.ones(rows, dtype=np.int32)),
            set_forward_context(None, runner.vllm_config, num_tokens=rows),
        ):
            hidden, _ = runner.model(**self._inputs(rows))
            runner.model.compute_logits(hidden[:rows])

    def _first(self, rows: int) -> None:
        """vLLM's first pass with a row a request, and trees of one level behind it."""
        drafter = self._runner.drafter
        aux = drafter.hidden_states.new_zeros(rows, drafter.model.model.fc_input_size)
        drafter.run_first_pass_alone(aux, CONTEXT)
        hidden = drafter.hidden_states.new_zeros(rows, drafter.hidden_size)
        log_probs, ids = ops.topk_logprobs(drafter.head.logits(hidden), self._runner.max_width)
        self._grow(log_probs, drafter.head.to_target(ids), 1)

    def _level(self, rows: int) -> None:
        """Trees of two levels: the head runs over the first one."""
        self._grow(*self._children(rows), 2)

    def _stump(self, rows: int) -> None:
        """The same trees without their second level."""
        self._grow(*self._children(rows), 1)

    def _children(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        width = min(_WIDTH, self._runner.max_width, rows)
        requests = -(-rows // width)
        return torch.zeros(requests, width), torch.zeros(requests, width, dtype=torch.int64)

    def _grow(self, log_probs: torch.Tensor, tokens: torch.Tensor, depth: int) -> None:
        drafter, (requests, width) = self._runner.drafter, log_probs.shape
        shapes = [TreeShape(depth, width, width * (1 + (depth - 1) * width))] * requests
        hidden = drafter.hidden_states.new_zeros(requests, drafter.hidden_size)
        roots = torch.zeros(requests, dtype=torch.int32)
        drafter.head.begin(hidden, roots, torch.zeros(requests, 1, dtype=torch.int32), scratch_rows_needed(shapes))
        expand_trees(drafter.head, log_probs, tokens, shapes, roots.tolist(), _Everything())

    def _attention(self) -> CostTable:
        """Of all layers of the target, for the rows of one tree after another, each behind a context."""
        runner = self._runner
        of_head = self._head_layers()
        layers = [layer for name, layer in runner.attention_layers().items() if name not in of_head]
        dtype = runner.model_config.dtype

        def run(rows: int) -> None:
            per_tree = min(rows, 1 + runner.settings.max_nodes)
            trees = -(-rows // per_tree)
            count = trees * per_tree
            start = torch.arange(trees + 1, dtype=torch.int32, device=runner.device) * per_tree
            places = TreePlaces(
                block_table=torch.zeros(trees, CONTEXT, dtype=torch.int32, device=runner.device),
                prefix_lens=torch.full((trees,), CONTEXT, dtype=torch.int32, device=runner.device),
                query_start=start,
                key_start=start,
                ancestors=torch.ones(count, dtype=torch.int64, device=runner.device),  # the root is everyone's
                prefixes=[CONTEXT] * trees,
                queries=[per_tree] * trees,
                keys=[per_tree] * trees,
            )
            tree_rows = TreeRows(None, places, runner.attention)
            for layer in layers:
                query = torch.zeros(count, layer.num_heads, layer.head_size, dtype=dtype, device=runner.device)
                key = query.new_zeros(count, layer.num_kv_heads, layer.head_size)
                cache = layer.impl.paged_kv(layer, layer.kv_cache)
                tree_rows.attend(layer.layer_name, query, key, key, cache, layer.impl.scale, torch.empty_like(query))

        return self._table(run)


def _seconds(run: Callable[[int], object], rows: int, sync: Callable[[], object]) -> float:
    started = time.perf_counter()
    run(rows)
    sync()
    return time.perf_counter() - started


def describe(costs: Costs) -> str:
    """Milliseconds of a few sizes, for people."""
    sizes = (1, 8, 64)
    tables = {"target": costs.target, "first pass": costs.first, "level": costs.level}
    parts = (f"{name} {' / '.join(f'{1000 * table(n):.2f}' for n in sizes)}" for name, table in tables.items())
    return f"{'; '.join(parts)} ({' / '.join(map(str, sizes))} rows)"
