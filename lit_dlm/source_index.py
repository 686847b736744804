"""Classes as their source shows them: what they are called, derive from and take, without imports.

Importing torch and Lightning takes seconds, so mistakes in a configuration are looked for here
first. Whatever the source does not tell is ``None``, and left to the parser.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard

_CLASS_LINE = re.compile(r"^class (\w+)", re.MULTILINE)
_SHORT_NAMES = ("lit_dlm", "lightning.pytorch", "torch.optim")
"""Packages whose classes configurations may give by their names alone."""


@dataclass(frozen=True, eq=False)
class Parameter:
    """One argument of a constructor."""

    annotation: ast.expr | None
    module: str
    """Where the annotation is written, to look up its names."""
    is_required: bool


@dataclass(frozen=True, eq=False)
class ClassSource:
    """A class statement and the module that holds it."""

    name: str
    module: str
    node: ast.ClassDef

    @property
    def is_dataclass(self) -> bool:
        """Whether its fields are its parameters."""
        return any("dataclass" in ast.unparse(one) for one in self.node.decorator_list)

    def lineage(self) -> list[ClassSource | None]:
        """The class and all bases that have a source, nearest first; ``None`` for any other."""
        found: list[ClassSource | None] = [self]
        for base in self.node.bases:
            name = ast.unparse(base).partition("[")[0]
            if name not in ("ABC", "Protocol", "Generic", "object"):
                one = class_in(self.module, name)
                found += [None] if one is None else one.lineage()
        return found

    def methods(self) -> set[str] | None:
        """Names of the methods that Lightning's own classes do not have; ``None`` if not known."""
        found: set[str] = set()
        for one in self.lineage():
            if one is None:
                return None
            if not one.module.startswith(("lightning.", "torch.")):
                found |= _functions(one.node).keys()
        return found

    def abstract_methods(self) -> set[str]:
        """Methods that a stand-in must have."""
        return {
            name
            for name, node in _functions(self.node).items()
            if any("abstractmethod" in ast.unparse(one) for one in node.decorator_list)
        }

    def parameters(self) -> dict[str, Parameter] | None:
        """What the constructor takes by name; ``None`` if that cannot be told."""
        found: dict[str, Parameter] = {}
        for one in self.lineage():
            if one is None:
                return None
            if (init := _functions(one.node).get("__init__")) is not None:
                names = _arguments(init, one.module)
                found = {**names, **found}
                if init.args.kwarg is None:
                    return found
            elif one.is_dataclass:
                found = {**_fields(one), **found}
        return found


def module_file(name: str) -> Path | None:
    """The file of a module, of which nothing is imported."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # the script that runs
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    for part in rest:
        if path.name != "__init__.py":
            return None
        inner = path.parent / part
        path = inner / "__init__.py" if inner.is_dir() else inner.with_suffix(".py")
    return path if path.suffix == ".py" and path.is_file() else None


def names_in(module: str) -> dict[str, ast.stmt] | None:
    """What a module binds, with the statement that does; ``None`` if that cannot be told."""
    path = module_file(module)
    return None if path is None else _names(path, path.stat().st_mtime_ns)


@cache
def _names(path: Path, changed: int) -> dict[str, ast.stmt] | None:
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return None
    return dict(_bound(tree.body))


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for one in body:
        if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield one.name, one
        elif isinstance(one, ast.Import | ast.ImportFrom):
            for alias in one.names:
                yield alias.asname or alias.name.partition(".")[0], one
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            for target in targets:
                yield from ((name.id, one) for name in ast.walk(target) if _is_bound(name))
        elif isinstance(one, ast.If | ast.Try | ast.With):
            for inner in (one.body, getattr(one, "orelse", [])):
                yield from _bound(inner)
            for handler in getattr(one, "handlers", []):
                yield from _bound(handler.body)


def _is_bound(node: ast.AST) -> TypeGuard[ast.Name]:
    """Not of ``name.attribute = ...``, which only reads the name."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def statement(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """The statement that defines a name, behind imports, and its module; ``None`` if not found."""
    for _ in range(9):
        one = (names_in(module) or {}).get(name)
        if not isinstance(one, ast.ImportFrom):
            return None if one is None or isinstance(one, ast.Import) else (module, one)
        alias = next(a for a in one.names if name in (a.asname, a.name))
        if one.level:
            path = module_file(module)
            parts = module.split(".")
            up = one.level - (path is not None and path.name == "__init__.py")
            module = ".".join([*parts[: len(parts) - up], *filter(None, [one.module])])
        else:
            module = one.module or ""
        name = alias.name
    return None


def class_in(module: str, name: str) -> ClassSource | None:
    """The class that a name means in a module."""
    outer, _, attribute = name.rpartition(".")
    if outer:
        one = (names_in(module) or {}).get(outer)
        if isinstance(one, ast.Import):
            return class_in(outer, attribute)
        return None
    found = statement(module, name)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    return ClassSource(found[1].name, found[0], found[1])


@cache
def _modules_of(package: str) -> dict[str, str]:
    """Module of every public class of a package, by its name."""
    top = module_file(package)
    found: dict[str, str] = {}
    for path in _files(top.parent) if top else []:
        parts = path.relative_to(top.parent).with_suffix("").parts if top else ()
        module = ".".join([package, *(part for part in parts if part != "__init__")])
        for name in _CLASS_LINE.findall(path.read_text()):
            if name[0] != "_":
                found.setdefault(name, module)
    return found


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):  # through links, unlike rglob
        if path.is_dir():
            yield from _files(path)
        elif path.suffix == ".py":
            yield path


def own_classes() -> list[str]:
    """Names of the public classes of this project."""
    return list(_modules_of("lit_dlm"))


def short_name(name: str) -> ClassSource | None:
    """The class that a configuration gives by its name alone."""
    for package in _SHORT_NAMES:
        if (module := _modules_of(package).get(name)) is not None:
            return class_in(module, name)
    return None


def named(name: str) -> ClassSource | None:
    """The class that an import path or a short name means; ``None`` if no source tells."""
    module, _, attribute = name.rpartition(".")
    return class_in(module, attribute) if module else short_name(attribute)


def _functions(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def _arguments(init: ast.FunctionDef, module: str) -> dict[str, Parameter]:
    args = init.args
    plain = [*args.posonlyargs, *args.args][1:]
    without = len(plain) - len(args.defaults)
    found = {a.arg: Parameter(a.annotation, module, n < without) for n, a in enumerate(plain)}
    for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found[one.arg] = Parameter(one.annotation, module, default is None)
    return found


def _fields(one: ClassSource) -> dict[str, Parameter]:
    return {
        line.target.id: Parameter(line.annotation, one.module, line.value is None)
        for line in one.node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and ast.unparse(line.annotation) != "KW_ONLY"
        and "ClassVar" not in ast.unparse(line.annotation)
    }
