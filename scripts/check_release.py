"""Checks that a tag, the version of the package and the changelog agree, and prints the changelog's section.

Usage: check_release.py TAG
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def section(changelog: str, version: str) -> str | None:
    """What the changelog says of a version, without its heading, or None."""
    found = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.DOTALL | re.MULTILINE)
    return found.group(1).strip() if found else None


def problem(tag: str, version: str, changelog: str) -> str | None:
    """Why this is no release, or None."""
    if tag != f"v{version}":
        return f"tag {tag!r}, but adaptivespec_vllm.__version__ is {version!r}; allowed: 'v{version}'"
    if not section(changelog, version):
        return f"CHANGELOG.md has nothing under '## [{version}]'"
    return None


def main(tag: str) -> None:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "adaptivespec_vllm/__init__.py").read_text(), re.MULTILINE)
    assert found
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if (reason := problem(tag, found.group(1), changelog)) is not None:
        sys.exit(f"check_release: {reason}")
    print(section(changelog, found.group(1)))


if __name__ == "__main__":
    main(sys.argv[1])
