"""Conditions of deliveries: what is parsed, and that everything else is refused with its place."""

from __future__ import annotations

from contextlib import suppress
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config.condition_syntax import FUNCTIONS, Call, ConditionSyntaxError, Literal, Reference, parse_condition

STATUS = Reference("after", "status")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("after.status = 'paid'", Call("=", (STATUS, Literal("paid")))),
        ("op == 'c'", Call("=", (Reference("", "op"), Literal("c")))),
        ("after.`odd ``name`", Reference("after", "odd `name")),
        ("not a.b is null", Call("not", (Call("is null", (Reference("a", "b"),)),))),
        ("-1", Literal(-1)),
        ("1.50", Literal(Decimal("1.50"))),
        ("1e3", Literal(1000.0)),
        ("date '2024-01-01'", Literal("2024-01-01", "date")),
        ("after.status -- a comment", STATUS),
        ("nvl(after.status, '')", Call("coalesce", (STATUS, Literal("")))),
    ],
)
def test_a_condition_is_a_tree(text: str, tree: object) -> None:
    assert parse_condition(text) == tree


def test_and_binds_more_than_or_and_less_than_not() -> None:
    a, b, c = (Reference("", name) for name in "abc")

    assert parse_condition("a or not b and c") == Call("or", (a, Call("and", (Call("not", (b,)), c))))
    assert parse_condition("a or b or c") == Call("or", (a, Call("or", (b, c))))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cast(after.num as int) = 2", "character 1: a condition can call only"),
        ("lower(after.status) = 'paid'", "a condition can call only"),
        ("after.a = rand()", "character 11: a condition can call only"),
        ("after.a in (select 1)", "character 20: expected ')'"),
        ("after.a % 2 = 0", "character 9: no part of the SQL"),
        ("after.a / 2 > 1", "no part of the SQL"),
        ("after.a rlike 'x'", "expected an operator or the end"),
        ("after.a = 'a' 'b'", "expected an operator between two texts"),
        ("after.a.b = 1", "expected an operator or the end"),
        ("after.a = 1 = 2", "expected an operator or the end"),
        ("after.a = 5L", "no part of the SQL"),
        ("substring(after.a) = ''", "needs 2 to 3 arguments"),
        ("coalesce() = 1", "expected a value"),
        ("(after.a", "expected ')'"),
        ("'open", "character 1: no part of the SQL"),
        ("", "character 1: expected a value"),
        ("(" * 1000, "nested too deeply"),
        ("not " * 1000 + "after.a", "nested too deeply"),
        ("1" + "+ 1" * 1000 + "= 2", "at most 30 operands"),
        (r"after.a = '\ud800'", "no character"),
    ],
)
def test_everything_else_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConditionSyntaxError) as refused:
        parse_condition(text)
    assert message in str(refused.value)


def test_a_long_list_of_alternatives_is_no_deep_tree() -> None:
    node = parse_condition(" or ".join(f"after.a = {number}" for number in range(5_000)))

    assert isinstance(node, Call)


WORDS = ("after", ".", "a", "op", "(", ")", ",", "'x'", "1", "and", "or", "not", "in", "is", "null", "like", "case",
         "when", "then", "end", "=", "-", "*", "||", "between", "date", *FUNCTIONS)  # fmt: skip


@given(st.text(max_size=30) | st.lists(st.sampled_from(WORDS), max_size=20).map(" ".join))
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    with suppress(ConditionSyntaxError):
        parse_condition(text)
