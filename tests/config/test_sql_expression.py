"""Expressions of Spark SQL: the identifiers in them, and the checks that need no Spark."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from cdc.config.sql_expression import Expression, named_in


def test_names_of_an_expression_are_neither_texts_nor_comments() -> None:
    expression = "f(`a b`, c.d, 'g', \"h\", 1e5, x'0a') -- i\n /* j */ AND k"

    assert [(name, called) for _, name, called in named_in(expression)] == [
        ("f", True),
        ("a b", False),
        ("c", False),
        ("d", False),
        ("x", False),
        ("AND", False),
        ("k", False),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f(1", "character 2: bracket is never closed"),
        ("a; b", "character 2: expected one expression"),
        ("rand() > 0.5", "character 1: the function is not deterministic"),
        ("a < DATE 'today'", "character 5: the date or time is another one every day"),
        ("Timestamp_NTZ  ' now'", "character 1: the date or time is another one every day"),
        ("(select 1)", "subqueries and window functions are not allowed"),
        (" -- nothing", "expected an expression"),
    ],
)
def test_an_expression_that_cannot_be_computed_from_one_row_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Expression).validate_python(text)
