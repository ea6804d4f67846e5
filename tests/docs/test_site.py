"""The site is built from the pages, without a warning, and needs no other host to be read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("myst_parser")
pytest.importorskip("furo")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-c", str(ROOT / "docs"), str(ROOT)]
    built = subprocess.run([*command, str(out)], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    return out


def test_every_page_is_there_and_the_root_leads_to_the_first(site: Path) -> None:
    expected = [path.with_suffix(".html") for path in sorted((ROOT / "docs").glob("*.md"))]
    assert [path.name for path in expected if not (site / path.relative_to(ROOT)).is_file()] == []
    first = re.search(r"url=([^\"]+)", (site / "index.html").read_text())
    assert first is not None and (site / first[1]).is_file()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=[\"'](?:https?:)?//[^\"']+", text)
        assert fetched == [], page
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"url\([\"']?(?:https?:)?//[^)]+|@import[^;]+//[^;]+", text) == [], sheet
