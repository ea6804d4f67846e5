"""``docs/what_to_expect.md`` names nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "what_to_expect.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| **")]


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_row_says_what_where_asked_and_how_shown() -> None:
    assert len(ROWS) == 27
    for row in ROWS:
        what, threads, here, shown = (cell.strip() for cell in row.strip("|").split(" | "))
        assert what and here and re.fullmatch(r"[\w/-]+#\d+(, [\w/-]+#\d+)*", threads), row
        assert re.search(r"`\w+/|\]\(", shown), f"nothing shows it: {what}"


@pytest.mark.parametrize("row", ROWS, ids=[row.split("**")[1] for row in ROWS])
def test_files_pages_and_headings_are_there(row: str) -> None:
    files = re.findall(r"`((?:tests|benchmarks|adaptivespec_vllm)/[\w/]+\.\w+)`", row)
    assert [file for file in files if not (ROOT / file).is_file()] == []
    for link in re.findall(r"\]\(([^)]+)\)", row):
        name, _, heading = link.partition("#")
        page = (PAGE.parent / name).resolve()
        assert page.is_file(), link
        assert not heading or heading in anchors(page), link
