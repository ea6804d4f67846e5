"""``docs/requests.md`` names every field that a request to the installed vLLM may carry, so a new one is noticed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.sampling_params import BeamSearchParams, SamplingParams

from adaptivespec_vllm.engine.overrides import KEYS

DOCS = Path(__file__).parents[2] / "docs" / "requests.md"
FIELDS = {
    "SamplingParams": set(SamplingParams.__struct_fields__),
    "BeamSearchParams": set(BeamSearchParams.__struct_fields__),
    "CompletionRequest": set(CompletionRequest.model_fields),
    "ChatCompletionRequest": set(ChatCompletionRequest.model_fields),
    "ResponsesRequest": set(ResponsesRequest.model_fields),
}
WAYS = {"tree", "chain", "plain", "front", "refused", "as above"}


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, its head left out."""
    section = DOCS.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def named(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def rest() -> set[str]:
    """Fields that the page calls vLLM's alone."""
    text = DOCS.read_text(encoding="utf-8")
    return named(text.split("About a request, not about decoding")[1].split("\n\n")[0])


def table(*headings: str) -> set[str]:
    return {name for heading in headings for row in rows(heading) for name in named(row[0])}


def test_every_sampling_parameter_has_a_row() -> None:
    missing = FIELDS["SamplingParams"] - table("Sampling")
    assert not missing, f"docs/requests.md, table 'Sampling': say what becomes of {sorted(missing)}"


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_of_a_request_is_named(kind: str) -> None:
    missing = FIELDS[kind] - table("Sampling", "HTTP") - rest()
    assert not missing, f"docs/requests.md: say what becomes of {sorted(missing)} of {kind}"


def test_nothing_is_named_that_no_request_has() -> None:
    known = set().union(*FIELDS.values())
    assert (table("Sampling", "HTTP") | rest()) <= known
    assert not table("Sampling", "HTTP") & rest()


def test_every_row_says_how() -> None:
    for heading in ("Sampling", "HTTP"):
        for row in rows(heading):
            assert row[1] in WAYS, row


def test_every_override_has_a_row() -> None:
    assert table("Overrides") == set(KEYS)
