"""The project's own source as data: files, syntax trees, and who imports whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cdc", "pipelines", "migrations")
OWN = (*PACKAGES, "tests")


@dataclass(frozen=True)
class Module:
    """One Python file."""

    path: Path

    @property
    def name(self) -> str:
        """Dotted, a package by its own name."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def place(self) -> str:
        """Path under the project's root, with slashes."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self) -> str:
        """The source."""
        return self.path.read_text(encoding="utf-8")

    @property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return parsed(self.path)

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree."""
        return _nodes(self.path)

    def imports(self) -> set[str]:
        """Every module it imports anywhere, as dotted names; of `from a import b` both `a` and `a.b`."""
        return set(_imported(self.path))

    def late_imports(self) -> set[str]:
        """What it imports inside functions."""
        scopes = [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        statements = [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom) and node.col_offset]
        return set().union(*(imported(scope) for scope in scopes)) if statements else set()


def imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


@cache
def _imported(path: Path) -> frozenset[str]:
    return frozenset(imported(parsed(path)))


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """The Python files below folders of the root, sorted."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(Module(path) for path in sorted(files) if "__pycache__" not in path.parts)


def imports_any(module: Module, *packages: str) -> set[str]:
    """Which of the packages, or modules below them, it imports."""
    return {name for name in module.imports() if any(name == p or name.startswith(f"{p}.") for p in packages)}
