"""Two ranks on a CPU, each a process: the text of one rank, and one decision on both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.envs import disable_envs_cache

from adaptivespec_vllm.config import resolve
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts, truth_of
from tests.e2e.oracle import Oracle

NODES = 12
FULL = {
    "num_speculative_tokens": NODES,
    "tree": {"policy": "static", "shape": {"depth": 4, "width": 3, "nodes": NODES}},
}


@pytest.fixture(scope="module")
def two(make_llm: Callable[..., Any], tiny_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine of two ranks whose caches differ: the second one holds no costs of the first."""
    disable_envs_cache()  # an engine before this one has turned it on
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        patch.setenv("VLLM_ADAPTIVESPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        return make_llm(
            speculative_config=adaptivespec(tiny_head, tree={"shape": {"depth": 6, "width": 4, "nodes": NODES}}),
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        )


# --- what the ranks are asked; runs in their processes ---


def use(worker: Any, settings: dict[str, Any]) -> None:
    """Other settings, from the next step on."""
    worker.model_runner.configure(resolve(settings))


def cheapen(worker: Any) -> None:
    """Costs of next to nothing: nearly all of a step's time is overhead."""
    from adaptivespec_vllm.policy.costs import Costs

    tables = {"target": [[1, 1e-9], [64, 2e-9]], "first": [[1, 1e-10]], "level": [[1, 1e-10]]}
    worker.model_runner.costs = Costs.from_dict(tables)


def watch(worker: Any) -> None:
    """Note the trees that a rank drafts."""
    runner = worker.model_runner
    runner.noted, keep = [], runner.keep_trees

    def keep_trees(trees: list) -> list[list[int]]:
        runner.noted += [(tree.root_position, tree.tokens, tree.parents) for tree in trees]
        return keep(trees)

    runner.keep_trees = keep_trees


def noted(worker: Any) -> list:
    """The trees noted since."""
    del worker.model_runner.keep_trees
    return worker.model_runner.noted


def hide(worker: Any, truth: dict) -> None:
    """Draft trees that hide the truth."""
    worker.oracle = Oracle(worker.model_runner, truth)


def seek(worker: Any) -> list[int]:
    """Draft as the head says again; how much was hidden."""
    worker.oracle.remove()
    return worker.oracle.hidden_lengths


def costs(worker: Any) -> tuple[dict, dict]:
    """Costs as the runner and as its policy know them."""
    runner = worker.model_runner
    return runner.costs.to_dict(), runner.policy.costs.to_dict()


def measure_again(worker: Any, cache: str) -> tuple[dict, dict]:
    """Ask for costs as at a start, each rank with a cache of its own: the first finds some, the second none."""
    import os

    from adaptivespec_vllm.engine.v1.costs import costs_of

    runner = worker.model_runner
    if worker.rank:
        os.environ["VLLM_ADAPTIVESPEC_CACHE"] = cache
    return costs_of(runner).to_dict(), runner.costs.to_dict()


# --- tests ---


def test_costs_are_one_decision(two: Any, tmp_path: Path) -> None:
    (first, of_policy), second = two.collective_rpc(costs)
    assert first == of_policy and (first, of_policy) == second
    assert first["target"]
    answers = two.collective_rpc(measure_again, args=(str(tmp_path),))
    assert answers[0][0] == answers[1][0]


def test_accepted_trees_give_the_text_of_one_rank(two: Any, plain: Any) -> None:
    prompts = random_prompts(6, seed=701)
    expected = generate(plain, prompts, greedy(40))
    two.collective_rpc(hide, args=(truth_of(prompts, expected),))
    two.collective_rpc("adaptivespec_stats")
    tokens = generate(two, prompts, greedy(40))
    hidden, stats = two.collective_rpc(seek), two.collective_rpc("adaptivespec_stats")
    assert tokens == expected
    assert hidden[0] == hidden[1]
    assert stats[0]["accepted"] == stats[1]["accepted"] > 50
    assert stats[0]["steps"] == stats[1]["steps"] < 6 * 40


def test_drafts_and_overhead_are_the_same_on_both_ranks(two: Any, plain: Any) -> None:
    prompts = random_prompts(3, seed=702)
    expected = generate(plain, prompts, greedy(150))
    two.collective_rpc(cheapen)
    for settings, fewest in ((FULL, 3 * 140), ({"num_speculative_tokens": NODES}, 10)):
        two.collective_rpc(use, args=(settings,))
        two.collective_rpc(watch)
        assert generate(two, prompts, greedy(150)) == expected
        first, second = two.collective_rpc(noted)
        assert first == second
        assert sum(bool(tokens) for _, tokens, _ in first) >= fewest
    first, second = two.collective_rpc(costs)
    assert first == second
    assert first[1]["overhead"] > 1e-6  # learnt by now


def test_sampling_follows_its_seed(two: Any, plain: Any) -> None:
    from vllm import SamplingParams

    prompts = random_prompts(4, seed=703)
    seeded = SamplingParams(temperature=0.8, seed=11, max_tokens=30, ignore_eos=True, detokenize=False)
    assert generate(two, prompts, seeded) == generate(plain, prompts, seeded)
