"""The project's own source as data: what each file imports, defines and names, found in one walk of its syntax tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar, cast

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("cdc", "pipelines", "migrations")
OWN: Final = (*PACKAGES, "tests")
Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True, slots=True)
class Function:
    """One function or method."""

    name: str
    parameters: tuple[str, ...]
    body_lines: int
    """Lines from the first statement after the docstring to the last."""
    is_route: bool
    """Whether a call of a method decorates it: its parameters are those of a request or a command line."""


@dataclass(frozen=True, slots=True)
class Class:
    """One class."""

    name: str
    bases: tuple[str, ...]
    is_public: bool
    """At the top of its module, with a name for others."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Between what a module chooses: classes, and names of kinds."""

    classes: frozenset[str]
    """Classes in isinstance, in issubclass, next to `type(x)`, in a case of `match`, and as keys of a mapping."""
    texts: frozenset[str]
    """Texts with which an attribute `type`, `kind`, `engine` or `product` is compared."""
    mappings: frozenset[frozenset[str]]
    """Texts that are the keys of a mapping, for each mapping that is written out."""

    @classmethod
    def of(cls, nodes: _Nodes) -> Choices:
        """Return the choices in a tree."""
        mappings = [[key for key in node.keys if key is not None] for node in nodes.of(ast.Dict)]
        return cls(
            frozenset(name for chosen in (*_chosen(nodes), *chain(*mappings)) for name in _class_names(chosen)),
            frozenset(_compared_texts(nodes)),
            frozenset(frozenset(text for key in keys for text in _texts(key)) for keys in mappings),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One Python file; its tree is not kept, for all of them have a million nodes."""

    path: Path
    place: str
    """Path under the project's root, with slashes."""
    name: str
    """Dotted, a package by its own name."""
    text: str
    docstring: str
    is_empty: bool
    """Whether it has no statement."""
    imports: frozenset[str]
    """Every module it imports anywhere, as dotted names; of `from a import b` both `a` and `a.b`."""
    late_imports: frozenset[str]
    """What it imports inside functions."""
    top_imports: frozenset[str]
    """The modules that are named by its imports at the top."""
    functions: tuple[Function, ...]
    classes: tuple[Class, ...]
    names: frozenset[str]
    """Every plain name."""
    stored: frozenset[str]
    """The names among them that are assigned to."""
    attributes: frozenset[str]
    """Every attribute of a plain name, dotted."""
    choices: Choices


def imports_any(module: Module, *packages: str) -> set[str]:
    """Which of the packages, or modules below them, it imports."""
    below = tuple(f"{package}." for package in packages)
    return {name for name in module.imports if name in packages or name.startswith(below)}


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """The Python files below folders of the root, sorted."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(_module(path) for path in sorted(files) if "__pycache__" not in path.parts)


@cache
def _module(path: Path) -> Module:
    place = path.relative_to(ROOT)
    parts = place.with_suffix("").parts
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    nodes = _Nodes(tree)
    names = nodes.of(ast.Name)
    pairs = [(node.value, node.attr) for node in nodes.of(ast.Attribute)]
    public = {node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}
    return Module(
        path=path,
        place=place.as_posix(),
        name=".".join(parts[:-1] if parts[-1] == "__init__" else parts),
        text=text,
        docstring=ast.get_docstring(tree) or "",
        is_empty=not tree.body,
        imports=frozenset(_imported(nodes.imports)),
        late_imports=frozenset(_imported(nodes.late_imports())),
        top_imports=frozenset(name for node in tree.body for name in _named(node)),
        functions=tuple(_function(node) for node in nodes.functions),
        classes=tuple(
            Class(node.name, tuple(ast.unparse(base) for base in node.bases), node in public)
            for node in nodes.of(ast.ClassDef)
        ),
        names=frozenset(node.id for node in names),
        stored=frozenset(node.id for node in names if isinstance(node.ctx, ast.Store)),
        attributes=frozenset(f"{value.id}.{name}" for value, name in pairs if isinstance(value, ast.Name)),
        choices=Choices.of(nodes),
    )


class _Nodes:
    """The nodes of a tree by their type."""

    def __init__(self, tree: ast.AST) -> None:
        self._by_type: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        for node in _walk(tree):
            self._by_type[type(node)].append(node)

    def of(self, kind: type[Node]) -> list[Node]:
        """Those of one type."""
        return cast("list[Node]", self._by_type[kind])

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Functions and methods."""
        return [*self.of(ast.FunctionDef), *self.of(ast.AsyncFunctionDef)]

    @property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Statements that import."""
        return [*self.of(ast.Import), *self.of(ast.ImportFrom)]

    def late_imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Statements that import inside functions."""
        if not any(node.col_offset for node in self.imports):
            return []  # most modules: none is indented
        inside = [node for function in self.functions for node in _walk(function)]
        return [node for node in inside if isinstance(node, ast.Import | ast.ImportFrom)]


_KIND_ATTRIBUTES: Final = {"type", "kind", "engine", "product"}


def choices_in(text: str) -> Choices:
    """Return the choices in the text of a module."""
    return Choices.of(_Nodes(ast.parse(text)))


def _chosen(nodes: _Nodes) -> Iterator[ast.expr]:
    for call in nodes.of(ast.Call):
        if isinstance(call.func, ast.Name) and call.func.id in {"isinstance", "issubclass"} and len(call.args) > 1:
            yield call.args[1]
    for compared in nodes.of(ast.Compare):
        if any(isinstance(side, ast.Call) and ast.unparse(side.func) == "type" for side in _sides(compared)):
            yield from _sides(compared)
    yield from (case.cls for case in nodes.of(ast.MatchClass))


def _compared_texts(nodes: _Nodes) -> Iterator[str]:
    for compared in nodes.of(ast.Compare):
        if any(isinstance(side, ast.Attribute) and side.attr in _KIND_ATTRIBUTES for side in _sides(compared)):
            yield from (text for side in _sides(compared) for text in _texts(side))


def _sides(compared: ast.Compare) -> list[ast.expr]:
    return [compared.left, *compared.comparators]


def _class_names(classes: ast.expr) -> Iterator[str]:
    """The last part of each name in a class, a tuple or a union of classes."""
    if isinstance(classes, ast.Tuple):
        for one in classes.elts:
            yield from _class_names(one)
    elif isinstance(classes, ast.BinOp):
        yield from _class_names(classes.left)
        yield from _class_names(classes.right)
    elif isinstance(classes, ast.Name | ast.Attribute):
        yield classes.id if isinstance(classes, ast.Name) else classes.attr


def _texts(value: ast.expr) -> Iterator[str]:
    """The texts in a literal, or in a list, tuple or set of literals."""
    if isinstance(value, ast.Tuple | ast.List | ast.Set):
        for one in value.elts:
            yield from _texts(one)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, in no order: as `ast.walk`, in a third of its time."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, list):
                waiting.extend(child for child in value if isinstance(child, ast.AST))
            elif isinstance(value, ast.AST):
                waiting.append(value)


def _imported(statements: Iterable[ast.Import | ast.ImportFrom]) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.Import):
            yield from _named(node)
        elif node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _named(node: ast.stmt) -> list[str]:
    """The modules that an import names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    signature = node.args
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return Function(
        name=node.name,
        parameters=tuple(a.arg for a in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)),
        body_lines=(body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0,
        is_route=any(isinstance(d, ast.Call) and isinstance(d.func, ast.Attribute) for d in node.decorator_list),
    )
