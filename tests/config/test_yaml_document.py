"""The YAML parser: plain values with line and column, and an issue for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config.yaml_document import FAULTY, MOST_VALUES, YamlDocument, read_document


def parse(text: str) -> YamlDocument:
    return read_document(Path("shop.yaml"), {"A": "1"}, text.encode())


def test_values_have_their_line_and_column() -> None:
    document = parse("name: shop\nsinks:\n  - name: ${A}\n    day: 2026-01-01\n")

    assert document.values == {"name": "shop", "sinks": [{"name": "1", "day": "2026-01-01"}]}
    assert document.places["sinks", 0, "name"] == (3, 5)
    assert document.issues == []


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\na: 2\n", 2, "duplicate key, first in line 1"),
        ("a: !!python/name:os.system x\n", 1, "tags are not allowed"),
        ("a:\n\t- 1\n", 2, "indentation by tabs"),
        ("", 1, "the file is empty"),
        ("a: \x01\n", 1, "character U\\+0001 is not allowed"),
        ("a: &a [*a]\n", 1, "nested too deep"),
    ],
)
def test_anything_else_is_an_issue_with_its_line(text: str, line: int, message: str) -> None:
    issues = parse(text.replace("\\x01", chr(1))).issues
    assert [issue.line for issue in issues] == [line]
    assert message.replace("\\", "") in issues[0].message


def test_an_unset_variable_leaves_a_placeholder_and_an_issue() -> None:
    document = parse("a: ${NONE}\n")

    assert document.values == {"a": FAULTY}
    assert [(issue.code, issue.key) for issue in document.issues] == [("CDC-1001", "a")]


def test_an_alias_bomb_is_limited() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 6)]

    assert MOST_VALUES < 10**6
    assert "too large" in parse("\n".join(lines)).issues[0].message
