"""Which package may import which, read from the sources.

``types`` lies below everything. Above it, a package imports lower levels only, never another one on its own level.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "adaptivespec_vllm"
NAME = PACKAGE.name

LEVELS = [
    {"types", "errors", "registry", "runtime", "chat"},
    {"config"},
    {"ops", "rules"},
    {"policy", "tree", "draft", "verify", "attention", "kv"},
    {"engine"},
    {"provenance", "screen"},
    {"serve", "check", "demo", "plugin", "training", "ray_serve"},
    {"bench", "batch"},
    {"simulate", "eval"},
    {"report"},
    {"cli"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
MAY_IMPORT_VLLM = {
    "engine",
    "plugin",
    "serve",
    "check",
    "demo",
    "bench",
    "eval",
    "training",
    "cli",
    "ray_serve",
    "batch",
}
NO_TORCH = {"policy", "config", "registry", "rules"}
MAY_USE_TORCH_OPS = {"ops", "engine"}  # engine: vLLM's own ops

SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "assets" not in path.parts)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, path: Path, *, typing_too: bool = True) -> Iterator[str]:
    """Absolute names of all imported modules and members."""
    package = (NAME, *path.relative_to(PACKAGE).parts[:-1])
    for node in walk(tree, typing_too=typing_too):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def walk(tree: ast.AST, *, typing_too: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not typing_too and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from walk(node, typing_too=typing_too)


def uses_torch_ops(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "ops"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        for node in ast.walk(tree)
    )


def faults(path: Path, source: str) -> list[str]:
    """Every breach of the rule in one file."""
    tree, part, found = ast.parse(source), part_of(path), []
    if part == "__init__":
        return [name for name in imports(tree, path) if name.split(".")[0] in (NAME, "torch", "vllm")]
    for name in imports(tree, path):
        first, *rest = name.split(".")
        if first == "vllm" and part not in MAY_IMPORT_VLLM:
            found.append(f"imports {name}")
        other = rest[0] if first == NAME and rest and rest[0] in LEVEL else part
        if other != part and LEVEL[other] >= LEVEL[part]:
            found.append(f"{part} imports {name}")
    if part in NO_TORCH:
        found += [f"imports {name}" for name in imports(tree, path, typing_too=False) if name.split(".")[0] == "torch"]
    if uses_torch_ops(tree) and part not in MAY_USE_TORCH_OPS:
        found.append("uses torch.ops")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(PACKAGE)) for path in SOURCES])
def test_source_follows_the_rule(path):
    assert part_of(path) in LEVEL | {"__init__": 0}, "a new package needs a level"
    assert faults(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("policy/x.py", "import torch"),
        ("policy/x.py", "def f():\n    from vllm import LLM"),
        ("policy/x.py", f"from {NAME}.tree import batch"),
        ("policy/x.py", "from ..tree import batch"),
        ("tree/x.py", f"import {NAME}.engine.head"),
        ("ops/x.py", f"from {NAME} import policy"),
        ("config.py", f"from {NAME}.ops import y"),
        ("verify/x.py", "import torch\ntorch.ops.x.y()"),
        ("demo/x.py", f"from {NAME}.cli import main"),
        ("__init__.py", "import torch"),
    ],
)
def test_breaches_are_seen(file, source):
    assert faults(PACKAGE / file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("policy/x.py", f"from {NAME}.types import TreeShape\nfrom . import base"),
        ("types.py", "if TYPE_CHECKING:\n    import torch"),
        ("engine/x.py", f"import vllm\nfrom {NAME}.policy import base\nimport torch\ntorch.ops._C.f()"),
        ("ops/x.py", "import torch\ntorch.ops.x.y()"),
        ("cli.py", f"from {NAME}.demo import cli"),
    ],
)
def test_what_is_allowed_is_not_a_breach(file, source):
    assert faults(PACKAGE / file, source) == []


def test_headers_do_not_include_torch():
    headers = [path for suffix in ("*.h", "*.hpp", "*.cuh") for path in (ROOT / "csrc" / "include").rglob(suffix)]
    pattern = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10)/', re.MULTILINE)
    assert [str(path) for path in headers if pattern.search(path.read_text(encoding="utf-8"))] == []
