"""Attributes of modules that are imported late, with `import_module`, exist: mypy does not see them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]


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


def test_every_late_attribute_exists() -> None:
    """Files without the word are not parsed: the walk over all of them takes seconds."""
    texts = [
        path.read_text(encoding="utf-8") for package in ("cdc", "pipelines") for path in (ROOT / package).rglob("*.py")
    ]
    found = {pair for text in texts if "import_module(" in text for pair in late_attributes(ast.parse(text))}
    assert found >= {("pipelines.apply_process", "main"), ("pipelines.verification.command", "run")}
    assert {(module, name) for module, name in found if not hasattr(import_module(module), name)} == set()
