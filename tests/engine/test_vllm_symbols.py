"""What is touched of vLLM is known, and says what it said when it was looked at (``scripts/vllm_compat.py``)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import vllm_compat  # noqa: E402
from vllm_source import Definition, Source, fingerprint  # noqa: E402
from vllm_uses import Use, uses  # noqa: E402

UPDATE = "read what it is used for, then run: python scripts/vllm_compat.py"


@pytest.fixture(scope="module")
def source() -> Source:
    return vllm_compat.installed()


@pytest.fixture(scope="module")
def used(source: Source) -> list[Use]:
    return uses(source)


def test_the_installed_vllm_says_what_it_said(source: Source, used: list[Use]) -> None:
    known = vllm_compat.stored()[source.version()]
    now = vllm_compat.fingerprints_of(source, used)
    changed = [
        f"{use.path}: {change}; {sorted(use.why | use.ways)} in {sorted(use.files)}"
        for use in used
        if (change := vllm_compat.change(known.get(use.path, now[use.path]), now[use.path]))
    ]
    assert changed == [], UPDATE


def test_everything_that_is_touched_is_listed(source: Source, used: list[Use]) -> None:
    known = vllm_compat.stored()
    assert {use.path for use in used} == known[source.version()].keys(), UPDATE
    gone = [use.path for use in used if source.find(use.path) is None]
    assert gone == [], "no longer in the installed vLLM"


def test_what_is_overridden_is_looked_for_at_start(used: list[Use]) -> None:
    # An override of a method that is gone would be called by nobody, and nobody would notice.
    silent = [
        use.path
        for use in used
        if "overridden" in use.ways and "listed" not in use.ways and not use.path.endswith("__")
    ]
    assert silent == [], "list it in engine/seams.py"


def test_the_page_is_what_is_known(used: list[Use]) -> None:
    page = vllm_compat.page(used, vllm_compat.stored())
    assert vllm_compat.PAGE.read_text() == page, "run: python scripts/vllm_compat.py"


def test_notes_are_about_differences() -> None:
    known = vllm_compat.stored()
    for version, notes in vllm_compat.NOTES.items():
        same = [path for path in notes if known["0.32"][path] == known[version][path]]
        assert same == []


FUNCTION = '''
def f(a, b=1):
    """Text."""
    # comment
    return g(a,
             f"{a} {b}" "c")
'''


def fingerprint_of(text: str) -> str:
    return fingerprint(Definition("m", "f", ast.parse(text).body[0]))


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ('"""Text."""', '"""Other."""', ""),
        ("# comment", "", ""),
        ("a,\n             f", "a, f", ""),
        ("g(a", "h(a", "body"),
        ("b=1", "b=2", "signature"),
        ('"c"', '"d"', "body"),
    ],
)
def test_a_fingerprint_follows_code_alone(before: str, after: str, what: str) -> None:
    changed = FUNCTION.replace(before, after)
    assert vllm_compat.change(fingerprint_of(FUNCTION), fingerprint_of(changed)) == what


def test_a_class_is_what_it_declares() -> None:
    text = "class f(Base):\n    x: int = 1\n    def m(self, y):\n        return y\n"
    known = fingerprint_of(text)
    assert known == fingerprint_of(text.replace("return y", "return 2 * y"))
    for before, after in (("= 1", "= 2"), ("self, y", "self, y, z"), ("Base", "Other"), ("x: int", "w: int")):
        assert vllm_compat.change(known, fingerprint_of(text.replace(before, after))) == "definition"
