"""Every symbol of vLLM that this package touches, walked from its sources.

Three kinds of places are looked at: what is imported and what is taken from it by name; what a subclass of a class of
vLLM's overrides; and what it takes from itself that vLLM has put there. ``engine/seams.py`` adds what only a person can
list (attributes of objects that are handed over), with the reason for each.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vllm_source import FUNCTIONS, Source

from adaptivespec_vllm.engine.seams import SEAMS

PACKAGE = Path(__file__).resolve().parents[1] / "adaptivespec_vllm"


@dataclass
class Use:
    """What becomes of a symbol here."""

    path: str
    ways: set[str] = field(default_factory=set)
    """`imported`, `overridden`, `called or read`, `set`, `listed`."""
    files: set[str] = field(default_factory=set)
    why: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Class:
    """A class of this package: its file, its bases as full names, and its tree."""

    file: str
    bases: tuple[str, ...]
    node: ast.ClassDef


def uses(source: Source, package: Path = PACKAGE) -> list[Use]:
    """All of them in the order of their paths; names are resolved in ``source``."""
    found: dict[str, Use] = {}

    def add(path: str, way: str, file: str = "", why: str = "") -> None:
        use = found.setdefault(path, Use(path))
        use.ways.add(way)
        use.files |= {file} - {""}
        use.why |= {why} - {""}

    why = ""
    for seam in SEAMS:
        why = why if seam.why == "the same" else seam.why
        add(seam.path, "listed", why=why)
    classes: dict[str, _Class] = {}
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = dict(_imports(tree))
        for symbol in _taken(tree, names, source):
            add(symbol, "imported", file)
        module = f"{package.name}.{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                bases = tuple(names.get(ast.unparse(base), f"{module}:{ast.unparse(base)}") for base in node.bases)
                classes[f"{module}:{node.name}"] = _Class(file, bases, node)
    for name in classes:
        for symbol, way, file in _inherited(name, classes, source):
            add(symbol, way, file)
    return _without_twins(sorted(found.values(), key=lambda use: use.path), source)


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local names of what is imported by absolute imports, with ``module:name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}:{alias.name}"


def _taken(tree: ast.AST, names: dict[str, str], source: Source) -> Iterator[str]:
    """Of each import from vLLM the symbol, or what is taken from it where it is a module."""
    own = {local: path for local, path in names.items() if path.split(":")[0].split(".")[0] == "vllm"}
    modules = {local: path.replace(":", ".") for local, path in own.items() if source.is_module(path.replace(":", "."))}
    yield from (path for local, path in own.items() if local not in modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and not node.attr.startswith("__"):
            local = node.value.id
            if local in modules:
                yield f"{modules[local]}:{node.attr}"
            elif local in own and source.find(f"{own[local]}.{node.attr}") is not None:
                yield f"{own[local]}.{node.attr}"


def _inherited(name: str, classes: dict[str, _Class], source: Source) -> Iterator[tuple[str, str, str]]:
    """What a class overrides, takes and sets of the classes of vLLM that it inherits from."""
    lineage = list(_lineage(name, classes))
    ours = [classes[base] for base in lineage if base in classes]
    theirs = [base for base in lineage if base.startswith("vllm.")]
    defined = {bound for cls in ours for bound in _defined(cls.node)}
    for cls in ours:
        for attribute, way in _touched(cls.node, defined):
            for base in theirs:
                path = f"{base}.{attribute}"
                if source.find(path) is not None:
                    yield path, way, cls.file
                    break


def _lineage(name: str, classes: dict[str, _Class]) -> Iterator[str]:
    yield name
    for base in classes[name].bases if name in classes else ():
        yield from _lineage(base, classes)


def _defined(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, FUNCTIONS):
            yield part.name


def _touched(node: ast.ClassDef, defined: set[str]) -> Iterator[tuple[str, str]]:
    for name in _defined(node):
        yield name, "overridden"
    for part in ast.walk(node):
        if not isinstance(part, ast.Attribute):
            continue
        on_self = isinstance(part.value, ast.Name) and part.value.id == "self"
        on_super = isinstance(part.value, ast.Call) and getattr(part.value.func, "id", "") == "super"
        if on_self and part.attr not in defined:
            yield part.attr, "set" if isinstance(part.ctx, ast.Store) else "called or read"
        elif on_super:
            yield part.attr, "called or read"


def _without_twins(found: list[Use], source: Source) -> list[Use]:
    """One entry for each definition: the one that is listed by hand, or else the shortest."""
    kept: dict[object, Use] = {}
    for use in sorted(found, key=lambda use: ("listed" not in use.ways, len(use.path))):
        definition = source.find(use.path)
        place = (definition.module, definition.name) if definition is not None else use.path
        first = kept.setdefault(place, use)
        if first is not use:
            first.ways |= use.ways
            first.files |= use.files
            first.why |= use.why
    return sorted(kept.values(), key=lambda use: use.path)
