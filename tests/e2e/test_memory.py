"""The memory that is counted before the KV cache is sized, against what a full batch really allocates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from vllm.v1.worker.cpu_worker import CPUWorker

from adaptivespec_vllm.engine.v1 import first_pass, memory
from adaptivespec_vllm.engine.v1.head import MOST_ROWS
from adaptivespec_vllm.engine.v1.memory import memory_needs
from tests.e2e import tiny
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts
from tests.e2e.oracle import runner_of
from tests.e2e.test_packed_head import make_head
from tests.e2e.test_putting_off import Sometimes

REQUESTS, NODES, BLOCK = 8, 20, 32
SHAPE = {"depth": 5, "width": 4, "nodes": NODES}


@pytest.fixture(scope="module")
def full(make_llm: Callable[..., Any], tiny_head: Path) -> Any:
    """An engine that always drafts trees of the full size."""
    return make_llm(
        speculative_config=adaptivespec(tiny_head, tree={"policy": "static", "shape": SHAPE}),
        max_num_seqs=REQUESTS,
        block_size=BLOCK,
        enable_prefix_caching=False,
    )


class Watched:
    """The largest of what a runner holds at a time, in bytes, while requests are decoded."""

    def __init__(self, runner: Any, patch: pytest.MonkeyPatch) -> None:
        self.most: Counter[str] = Counter()
        self._runner = runner
        backlog, drafter, head = runner.drafter.backlog, runner.drafter, runner.drafter.head
        self._after(patch, runner, "_model_forward", self._forward)
        self._before(patch, runner.rejection_sampler, "forward", lambda _, __, logits, *___: self.see("logits", logits))
        self._before(patch, drafter, "_run_first_pass", lambda _, **kw: self.see("first", kw["target_hidden_states"]))
        self._after(patch, head, "level", self._level)
        self._after(patch, backlog, "put", lambda _: self._backlog(backlog))

    def see(self, what: str, *tensors: Any) -> None:
        self.most[what] = max(self.most[what], sum(tensor.nbytes for tensor in tensors))

    def _forward(self, _: Any) -> None:
        fresh = [pair for step in self._runner._attention_steps for pair in step.trees.fresh.values()]
        self.see("fresh", *(tensor for pair in fresh for tensor in pair))

    def _level(self, logits: Any) -> None:
        self.see("levels", logits, *(attention.scratch for attention in self._runner.drafter.head._attention))

    def _backlog(self, backlog: Any) -> None:
        parts = [part for parts in backlog.parts.values() for part in parts]
        self.see("backlog", *(t for part in parts for t in (part.tokens, part.positions, part.hidden)))

    @staticmethod
    def _before(patch: pytest.MonkeyPatch, owner: Any, name: str, look: Callable[..., None]) -> None:
        stock = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return stock(*args, **kwargs)

        patch.setattr(owner, name, watched)

    @staticmethod
    def _after(patch: pytest.MonkeyPatch, owner: Any, name: str, look: Callable[[Any], None]) -> None:
        stock = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            look(result)
            return result

        patch.setattr(owner, name, watched)


def test_buffers_of_a_full_batch_are_those_that_were_counted(full: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(full)
    needs = memory_needs(runner)
    assert (needs.requests, needs.rows) == (REQUESTS, REQUESTS * (1 + NODES))
    watched = Watched(runner, monkeypatch)
    generate(full, random_prompts(REQUESTS, seed=501), greedy(30))
    most = watched.most
    # Keys and values, and logits, are exact: the batch was the largest there can be.
    assert most["fresh"] == needs.fresh == needs.rows * tiny.LAYERS * 2 * tiny.KV_HEADS * tiny.HEAD_SIZE * 4
    assert most["logits"] == needs.logits == needs.rows * tiny.VOCABULARY * 4
    assert most["levels"] == needs.levels
    assert 0 < most["first"] <= needs.first_pass / 3


def test_the_head_takes_what_its_file_holds(full: Any) -> None:
    runner = runner_of(full)
    tensors = load_file(Path(runner.settings.model) / "model.safetensors")
    held = sum(tensor.nbytes for name, tensor in tensors.items() if name != "t2d")  # the map the other way: not loaded
    assert memory_needs(runner).weights == pytest.approx(held, abs=256)  # besides, a few scales of the attention


def test_first_passes_on_packed_weights_share_the_scratch(make_llm: Callable[..., Any], tmp_path: Path) -> None:
    tree = {"policy": "static", "shape": SHAPE}
    llm = make_llm(speculative_config=adaptivespec(make_head(tmp_path / "head", {}), tree=tree), max_num_seqs=REQUESTS)
    head, needs = runner_of(llm).drafter.head, memory_needs(runner_of(llm))
    assert needs.packed == head.packed_bytes > 0
    generate(llm, random_prompts(REQUESTS, seed=504, shortest=MOST_ROWS, longest=MOST_ROWS), greedy(4))
    scratch = sum(attention.scratch.nbytes for attention in head._attention)
    assert scratch + REQUESTS * SHAPE["width"] * tiny.DRAFT_VOCABULARY * 4 == needs.levels


def test_a_full_backlog_is_what_was_counted(full: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(full)
    for module in (first_pass, memory):
        monkeypatch.setattr(module, "PUT_OFF_BYTES", 0)
    policy = Sometimes(runner.settings, 10_000)
    policy.signals = runner.policy.signals  # requests that end meanwhile are forgotten by both
    monkeypatch.setattr(runner, "policy", policy)
    watched = Watched(runner, monkeypatch)
    prompts = random_prompts(REQUESTS, seed=502, shortest=9, longest=9)
    generate(full, prompts, greedy(150))
    assert watched.most["backlog"] == memory_needs(runner).backlog


def test_kv_blocks_for_draft_tokens_are_at_most_those_that_were_counted(
    full: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(full)
    scheduler = full.llm_engine.engine_core.engine_core.scheduler
    beyond = []

    def look(scheduler_output: Any, *_: Any) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            held = len(scheduler.kv_cache_manager.get_block_ids(request)[0])
            beyond.append(held - -(-(computed + 1) // BLOCK))

    Watched._before(monkeypatch, runner, "execute_model", look)
    generate(full, random_prompts(REQUESTS, seed=503), greedy(60))
    assert REQUESTS * max(beyond) == memory_needs(runner).kv_blocks == REQUESTS * 2


def test_what_comes_later_is_left_out_of_the_kv_cache(full: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = full.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    needs = memory_needs(worker.model_runner)
    chosen = worker.determine_available_memory()
    assert chosen == worker.cache_config.kv_cache_memory_bytes  # the user's choice stays

    monkeypatch.setattr(worker.cache_config, "kv_cache_memory_bytes", None)
    monkeypatch.setattr(worker, "requested_cpu_memory", psutil.Process().memory_info().rss + (1 << 30), raising=False)
    stock, ours = CPUWorker.determine_available_memory(worker), worker.determine_available_memory()
    assert stock - ours == pytest.approx(needs.later, abs=1 << 20)  # other threads allocate, too
    assert needs.later > 4 << 20


def test_a_chosen_size_that_leaves_too_little_is_warned_about(
    full: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = full.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    worker.determine_available_memory()
    assert not [record for record in caplog.records if "run out of memory" in record.message]
    nearly_all = psutil.virtual_memory().available - (1 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": nearly_all}))
    monkeypatch.setattr(worker.cache_config, "kv_cache_memory_bytes", nearly_all - (1 << 20))
    worker.determine_available_memory()
    (message,) = {record.message for record in caplog.records if "run out of memory" in record.message}
    assert "--kv-cache-memory-bytes" in message
