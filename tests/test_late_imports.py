"""Attributes of modules that are imported late, with `import_module`, exist: mypy does not see them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    str(path.relative_to(ROOT)) for package in ("cdc", "pipelines") for path in (ROOT / package).rglob("*.py")
)


def late_attributes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, attribute) of `import_module("…").attribute`, also through a local name of the same function."""
    for scope in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        modules = dict(assigned_modules(scope))
        for node in ast.walk(scope):
            if not isinstance(node, ast.Attribute):
                continue
            name = imported(node.value)
            if name is None and isinstance(node.value, ast.Name):
                name = modules.get(node.value.id)
            if name is not None:
                yield name, node.attr


def assigned_modules(scope: ast.AST) -> Iterator[tuple[str, str]]:
    """(local name, module) of every assignment of `import_module("…")` in a function."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = (
                zip(target.elts, node.value.elts, strict=True)
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                else [(target, node.value)]
            )
            for left, right in pairs:
                if isinstance(left, ast.Name) and (name := imported(right)) is not None:
                    yield left.id, name


def imported(node: ast.expr) -> str | None:
    """The module of `import_module("…")`; None for other expressions and other arguments."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "import_module":
        argument = node.args[0]
        return str(argument.value) if isinstance(argument, ast.Constant) else None
    return None


FOUND = sorted({pair for file in FILES for pair in late_attributes(ast.parse((ROOT / file).read_text("utf-8")))})


def test_the_walk_finds_late_imports_of_each_form() -> None:
    assert ("pipelines.apply_process", "main") in FOUND
    assert ("pipelines.verification.command", "run") in FOUND


@pytest.mark.parametrize(("module", "attribute"), FOUND)
def test_a_late_attribute_exists(module: str, attribute: str) -> None:
    assert hasattr(import_module(module), attribute)
