"""Files a newcomer copies from: examples, the README's snippets, the prompts of the end-to-end tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from adaptivespec_vllm.config import load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = {path.name: path.read_text() for path in sorted((ROOT / "examples").glob("adaptivespec*.json"))}
SNIPPETS = re.findall(r"```json\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("text", [*EXAMPLES.values(), *SNIPPETS])
def test_every_configuration_shown_is_valid(text: str) -> None:
    assert load(text).config.model == "HEAD"


def test_the_readme_shows_the_examples() -> None:
    assert len(EXAMPLES) == 3
    assert sorted(map(json.dumps, map(json.loads, SNIPPETS))) == sorted(
        map(json.dumps, map(json.loads, EXAMPLES.values()))
    )


def test_the_full_example_writes_out_every_default_but_margin_and_cap() -> None:
    full = load(EXAMPLES["adaptivespec-full.json"]).config.to_resolved_dict()
    minimal = load(EXAMPLES["adaptivespec.json"]).config.to_resolved_dict()
    assert {key for key in full if full[key] != minimal[key]} == {"margin", "num_speculative_tokens"}


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_prompts_are_whole() -> None:
    lines = (ROOT / "tests/e2e/data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    kinds = [prompt["kind"] for prompt in prompts]
    assert {kind: kinds.count(kind) for kind in kinds} == {"math": 22, "code": 20, "chat": 20}
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    assert all(prompt["prompt"].strip() for prompt in prompts)
