"""A tree of vLLM's sources, read without importing it: where a symbol is defined, and a fingerprint of what it says.

So two versions can be compared on a machine that has neither's dependencies, and with any version of Python.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Definition:
    """Where a symbol is defined; ``node`` is None for a module."""

    module: str
    name: str
    node: ast.AST | None


class Source:
    """The package ``vllm`` below a directory."""

    def __init__(self, root: Path) -> None:
        if not (root / "vllm" / "__init__.py").is_file():
            raise FileNotFoundError(f"{root}: no package vllm in it")
        self.root = root
        self.find = cache(self._find)
        self._names = cache(self._read_names)
        self._members = cache(_members)

    def version(self) -> str:
        """Major and minor, as ``0.32``."""
        text = (self.root / "vllm" / "_version.py").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
                return ".".join(str(ast.literal_eval(node.value)).split(".")[:2])
        raise ValueError(f"{self.root}: vllm/_version.py names no version")

    def is_module(self, name: str) -> bool:
        return self._file(name) is not None

    def _find(self, path: str) -> Definition | None:
        """The definition of ``module:Class.attribute``, through imports and base classes; None where it is gone."""
        module, _, qualified = path.partition(":")
        if not qualified:
            return Definition(module, "", None) if self.is_module(module) else None
        first, *rest = qualified.split(".")
        found = self._in_module(module, first)
        for name in rest:
            found = self._in_class(found, name) if found is not None else None
        return found

    def _in_module(self, module: str, name: str) -> Definition | None:
        known = self._names(module).get(name)
        if known is None:
            return Definition(f"{module}.{name}", "", None) if self.is_module(f"{module}.{name}") else None
        if isinstance(known, ast.AST):
            return Definition(module, name, known)
        origin, attribute = known
        return self._in_module(origin, attribute) if attribute else Definition(origin, "", None)

    def _in_class(self, owner: Definition, name: str) -> Definition | None:
        for cls in self.ancestry(owner):
            assert isinstance(cls.node, ast.ClassDef)  # that is what an ancestry consists of
            members = self._members(cls.node)
            if name in members:
                return Definition(cls.module, f"{cls.name}.{name}", members[name])
        return None

    def ancestry(self, owner: Definition) -> Iterator[Definition]:
        """A class and those of vLLM that it inherits from; of a value that a class was called for, that class."""
        node = owner.node
        if isinstance(node, ast.ClassDef):
            yield owner
            for base in node.bases:
                found = self._named(owner.module, base.value if isinstance(base, ast.Subscript) else base)
                if found is not None:
                    yield from self.ancestry(found)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            found = self._named(owner.module, node.value.func)
            if found is not None:
                yield from self.ancestry(found)

    def _named(self, module: str, expression: ast.AST) -> Definition | None:
        if isinstance(expression, ast.Name):
            return self._in_module(module, expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self._named(module, expression.value)
            if owner is not None and not owner.name:
                return self._in_module(owner.module, expression.attr)
        return None

    def _read_names(self, module: str) -> dict[str, ast.AST | tuple[str, str]]:
        """What a module binds: a definition, or the module and name that an import takes it from."""
        file = self._file(module)
        if file is None:
            return {}
        names: dict[str, ast.AST | tuple[str, str]] = {}
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for node in _statements(ast.parse(file.read_text(encoding="utf-8")).body):
            if isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                origin = ".".join(filter(None, (base, node.module)))
                for alias in node.names:
                    names.setdefault(alias.asname or alias.name, (origin, alias.name))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        names.setdefault(alias.asname, (alias.name, ""))
            for name in _bound(node):
                names[name] = node
        lazy = names.get("MODULE_ATTRS")  # names of the package itself, imported when they are asked for
        if isinstance(lazy, ast.Assign):
            for name, origin in ast.literal_eval(lazy.value).items():
                where, _, attribute = origin.partition(":")
                names[name] = (f"{module}{where}" if where.startswith(".") else where, attribute)
        return names

    def _file(self, module: str) -> Path | None:
        place = self.root.joinpath(*module.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if module.split(".")[0] == "vllm" and file.is_file():
                return file
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under ``if``, ``try`` and ``with`` among them."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _members(cls: ast.ClassDef) -> dict[str, ast.AST | None]:
    """What a class defines, and, without a definition, what its methods set."""
    members: dict[str, ast.AST | None] = {name: None for node in ast.walk(cls) for name in _bound_on_self(node)}
    return members | {name: node for node in cls.body for name in _bound(node)}


def _bound(node: ast.AST) -> list[str]:
    """Names that a statement defines."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _bound_on_self(node: ast.AST) -> list[str]:
    """Attributes that a statement of a method sets."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [
        part.attr
        for part in parts
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
    ]


def fingerprint(found: Definition) -> str:
    """What a definition says, without comments, docstrings and layout: ``interface`` or ``interface/body``, as hashes.

    The interface of a function is its signature with decorators, that of a class what it declares (bases, fields,
    signatures); methods that matter have entries of their own. Of attributes that methods set, and of modules, it only
    counts that they are there.
    """
    node = found.node
    if node is None:
        return "there"
    if isinstance(node, ast.ClassDef):
        return _hash(node.bases, node.keywords, node.decorator_list, [_interface(part) for part in node.body])
    if isinstance(node, FUNCTIONS):
        return f"{_hash(_interface(node))}/{_hash(node.body)}"
    return _hash(node)


def _interface(node: ast.AST) -> list[object]:
    if isinstance(node, FUNCTIONS):
        return [type(node).__name__, node.name, node.args, node.returns, node.decorator_list]
    return [node] if isinstance(node, ast.Assign | ast.AnnAssign) else []


def _hash(*parts: object) -> str:
    return hashlib.sha256(_canonical(list(parts)).encode()).hexdigest()[:8]


def _canonical(value: object) -> str:
    """A syntax tree as text that no version of Python writes in another way: empty fields are left out."""
    if isinstance(value, list):
        return "[" + ",".join(_canonical(part) for part in _joined(value) if not _is_text(part)) + "]"
    if not isinstance(value, ast.AST):
        return repr(value)
    left_out = ("ctx", "kind", "type_comment")
    fields = [
        f"{name}={_canonical(part)}"
        for name, part in sorted(ast.iter_fields(value))
        if name not in left_out and part not in (None, [])
    ]
    return f"{type(value).__name__}({','.join(fields)})"


def _joined(parts: list[object]) -> list[object]:
    """Neighbouring texts of an f-string as one; versions of Python split them in different places."""
    if not any(isinstance(part, ast.FormattedValue) for part in parts):
        return parts
    joined: list[object] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, ast.Constant) and isinstance(last, ast.Constant):
            joined[-1] = ast.Constant(f"{last.value}{part.value}")
        else:
            joined.append(part)
    return joined


def _is_text(part: object) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)
