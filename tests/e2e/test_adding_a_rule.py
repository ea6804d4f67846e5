"""A rule and two policies written as the documentation says, registered and decoded with on the real engine."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.config import describe, resolve
from adaptivespec_vllm.registry import POLICIES, RULES
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts
from tests.e2e.oracle import runner_of

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / f"adding_a_{what}.md").read_text() for what in ("rule", "policy"))


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files of the documentation, registered by where they are."""
    files = re.findall(r"```python\n# adaptivespec_vllm/\w+/(\w+)\.py\n(.*?)```", PAGES, re.DOTALL)
    for name, text in files:
        (tmp_path / f"documented_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    RULES.add("top-k", "documented_top_k:TopK")
    POLICIES.add("alternating", "documented_alternating:AlternatingPolicy")
    POLICIES.add("confident", "documented_confident:ConfidentPolicy")
    yield
    RULES.remove("top-k")
    POLICIES.remove("alternating")
    POLICIES.remove("confident")


@pytest.mark.usefixtures("registered")
def test_the_documented_rule_and_policy(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"rule.k", "tree.nodes"} <= {row.key for row in describe()}
    options = adaptivespec(tiny_head, rule={"name": "top-k", "k": 512}, tree={"policy": "alternating", "nodes": 4})
    llm = make_llm(speculative_config=options)
    runner = runner_of(llm)
    shapes: list[tuple[int, int, int]] = []
    bounds = runner.bounds
    monkeypatch.setattr(
        runner, "bounds", lambda confidences: (drafted := bounds(confidences), shapes.extend(drafted))[0]
    )
    prompts = random_prompts(3, seed=92)
    llm.collective_rpc("adaptivespec_stats")
    lossy = generate(llm, prompts, greedy(24))
    stats = llm.collective_rpc("adaptivespec_stats")[0]
    expected = generate(plain, prompts, greedy(24))
    assert lossy != expected
    # Of 512 tokens all are among the 512 likeliest: every chain and one child of every wide tree is accepted.
    assert stats["promotions"] > 10
    assert stats["accepted"] >= stats["steps"] - 3
    assert {tuple(shape) for shape in shapes} >= {(4, 1, 4), (1, 4, 4)}
    assert generate(llm, prompts, greedy(24, extra_args={"adaptivespec_margin": 0})) == expected


@pytest.mark.usefixtures("registered")
def test_the_documented_policy_that_looks_while_a_tree_grows(
    make_llm: Callable[..., Any], tiny_head: Path, plain: Any
) -> None:
    prompts = random_prompts(3, seed=93)
    expected = generate(plain, prompts, greedy(24))
    depths = {}
    for least in (1e-9, 0.999):
        tree = {"policy": "confident", "least": least, "shape": {"depth": 3, "width": 2, "nodes": 6}}
        llm = make_llm(speculative_config=adaptivespec(tiny_head, tree=tree))
        llm.collective_rpc("adaptivespec_stats")
        assert generate(llm, prompts, greedy(24)) == expected
        depths[least] = set(llm.collective_rpc("adaptivespec_stats")[0]["depths"])
    assert (max(depths[1e-9]), max(depths[0.999])) == (3, 1)


def test_a_name_that_is_not_registered_is_refused() -> None:
    with pytest.raises(ValueError, match=r'rule\.name: got "top-k"; allowed: .mars. or .fly. or .typical.'):
        resolve({"rule": {"name": "top-k"}})


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'mars' is registered already"):
        RULES.add("mars", "somewhere:Else")
