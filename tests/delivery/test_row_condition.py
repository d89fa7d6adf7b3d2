"""Conditions over changes: which are true, which are unknown, and which cannot be evaluated."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from cdc.delivery.formats.table_changes import table_changes
from cdc.delivery.row_condition import RowCondition
from cdc.errors import TransformFailed
from cdc.table import Column, ReplicaIdentity, TableSchema
from tests.log.rows import row, table

COLUMNS = (
    Column(id=1, name="id", type_oid=20, type_name="bigint", key=0),
    Column(id=2, name="status", type_oid=25, type_name="text"),
    Column(id=3, name="price", type_oid=1700, type_name="numeric", typmod=(10 << 16 | 2) + 4),
    Column(id=4, name="at", type_oid=1184, type_name="timestamp with time zone"),
    Column(id=5, name="Odd name", type_oid=16, type_name="boolean"),
    Column(id=6, name="n", type_oid=23, type_name="integer"),
    Column(id=7, name="amount", type_oid=1700, type_name="numeric"),
    Column(id=8, name="code", type_oid=1042, type_name="character", typmod=9),
    Column(id=9, name="tags", type_oid=1009, type_name="text[]"),
)
ORDERS = TableSchema(
    relation=16384, oid=16384, schema="shop", name="orders", replica_identity=ReplicaIdentity.FULL, columns=COLUMNS
)


def image(
    number: int, status: str | None, price: str | None = "1.50", **more: str | None
) -> list[tuple[int, str | None]]:
    return [(1, str(number)), (2, status), (3, price), (4, more.get("at")), (5, more.get("odd"))]


def matches(text: str, *rows: dict[str, Any], schema: TableSchema = ORDERS) -> tuple[list[int], list[int]]:
    found = RowCondition(text, schema).matches(table_changes(schema, "", table(*rows)))
    return found.kept.tolist(), found.failed.tolist()


PAID = row(
    1, 0, op="u", before=image(1, "placed"), after=image(1, "paid", "20.00", at="2026-01-01 00:00:00+00", odd="t")
)
SAME = row(1, 1, op="u", before=image(2, "paid"), after=image(2, "paid", "9.99"))
NEW = row(1, 2, op="c", after=image(3, None))
GONE = row(1, 3, op="d", before=image(4, "paid"), after=None)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("after.status <> before.status", [0]),
        ("after.price >= 9.99", [0, 1]),
        ("op = 'd' OR after.status IS NULL", [2, 3]),
        ("after.id IN (2, 3)", [1, 2]),
        ("after.at > timestamp '2025-12-31 23:59:59+00'", [0]),
        ("after.`Odd name`", [0]),
        ("coalesce(after.status, 'none') = 'none'", [2, 3]),
    ],
)
def test_a_change_is_kept_if_the_condition_is_true(text: str, kept: list[int]) -> None:
    assert matches(text, PAID, SAME, NEW, GONE) == (kept, [])


def test_a_column_that_was_not_sent_keeps_the_change() -> None:
    partial = row(1, 0, op="u", after=[(1, "1"), (3, "1.00")], partial=True)
    assert matches("after.status = 'paid'", partial, NEW) == ([0], [])
    assert matches("after.price > 5", partial) == ([], [])


def test_a_value_that_the_type_does_not_have_fails_its_change_alone() -> None:
    broken = row(1, 0, after=image(1, "paid", "NaN"))
    assert matches("after.price > 1", broken, PAID) == ([1], [0])


@pytest.mark.parametrize("text", ["status = 'paid'", "after.missing = 1", "other.status = 'paid'"])
def test_a_name_that_is_no_column_is_refused(text: str) -> None:
    with pytest.raises(TransformFailed, match="expected op, or a column of the table"):
        RowCondition(text, ORDERS)


def test_old_values_need_replica_identity_full() -> None:
    keys_only = replace(ORDERS, replica_identity=ReplicaIdentity.DEFAULT)
    with pytest.raises(TransformFailed, match="does not send old rows"):
        RowCondition("after.status <> before.status", keys_only)
    assert matches("after.price > 5", PAID, NEW, schema=keys_only) == ([0], [])


def values(number: int, **texts: str) -> dict[str, Any]:
    """An insert with some columns, the others null."""
    return row(1, number, after=[(column.id, texts.get(column.name)) for column in COLUMNS])


@pytest.mark.parametrize(
    ("text", "texts", "kept", "failed"),
    [
        (r'after.status like "A\\_%"', {"status": ["A_1", "AB1", "A_"]}, [0, 2], []),
        ("after.status like 'A!_%' escape '!'", {"status": ["A_1", "AB1"]}, [0], []),
        ("substr(after.status, -2147483648) = 'ab'", {"status": ["abc"]}, [0], []),
        ("substring(after.status, 0, 2) = 'ab'", {"status": ["abc", "xab"]}, [0], []),
        ("after.n * 1000 > 10", {"n": ["1", "2147483647", "0"]}, [0], [1]),
        ("after.amount <> 9007199254740992", {"amount": ["9007199254740993", "9007199254740992.0", "NaN"]}, [0], [2]),
        ("after.amount = 1e2", {"amount": []}, [], []),
        ("after.code = 'ab'", {"code": ["ab   ", "abc  ", "b    "]}, [0], []),
        ("after.code < 'abc'", {"code": ["ab   ", "abc  ", "b    "]}, [0], []),
        (
            "after.at < '3000-01-01'",
            {"at": ["2024-01-01 00:00:00+00", "infinity", "0044-03-15 00:00:00+00 BC"]},
            [0],
            [1, 2],
        ),
        # Spark compares a list with a floating-point number in floating point
        ("after.amount in (1, 2)", {"amount": ["1.0", "3"]}, [0], []),
        ("after.id in (9007199254740992, 0e0)", {"id": ["9007199254740993", "7"]}, [0], []),
        ("after.tags IS NOT NULL", {"tags": ["{a}", "{}"]}, [0, 1], []),
    ],
)
def test_a_condition_means_what_it_means_in_spark(
    text: str, texts: dict[str, list[str]], kept: list[int], failed: list[int]
) -> None:
    ((name, column),) = texts.items()
    rows = [values(number, **{name: value}) for number, value in enumerate(column)]
    if text == "after.amount = 1e2":
        with pytest.raises(TransformFailed, match="floating-point"):
            matches(text, *rows)
        return
    assert matches(text, *rows) == (kept, failed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("after.status = 5", "types text and int cannot be compared"),
        ("after.n = '5'", "types int and text cannot be compared"),
        ("after.n < 123456789012345678901234567890", "no integer reaches"),
        ("NULL in (after.price, after.at)", "cannot be compared"),
        ("after.n in (1, after.status)", "cannot be compared"),
        ("after.code = after.status", "char"),
        ("after.code like 'a%'", "'LIKE' cannot read a value of type char"),
        ("length(after.code) = 2", "cannot read a value of type char"),
        ("after.tags = 'a'", "only be compared with NULL"),
        ("after.price * 2 > 1", "only with integers"),
        ("after.at < 'tomorrow'", "expected YYYY-MM-DD"),
        ("after.status", "expected a condition"),
        ("after.status like after.status", "expected a text as pattern"),
        ("after.status like 'a!' escape '!'", "escape character"),
        ("coalesce(after.n, after.status) = 'x'", "cannot be alternatives"),
    ],
)
def test_a_condition_that_the_types_do_not_allow_is_refused(text: str, message: str) -> None:
    with pytest.raises(TransformFailed, match=re.escape(message) if "'" in message else message):
        RowCondition(text, ORDERS)


@pytest.mark.parametrize(
    ("text", "can_match"),
    [
        ("op <> 'd'", False),
        ("op in ('c', 'u')", False),
        ("op = 'c' and after.n > 1", False),
        ("after.status = 'paid'", False),
        ("after.status = 'paid' or op = 'd'", True),
        ("not (op = 'd')", False),
        ("after.status is null", True),
        ("after.status is not null", False),
        ("before.status = 'paid'", True),
        ("op = 'c' or before.n > 1", True),
        ("op = 'd' and before.n > 1", True),
        ("op not in ('d')", False),
        ("coalesce(after.status, 'x') = 'x'", True),
    ],
)
def test_a_condition_that_excludes_deletes_is_known(text: str, can_match: bool) -> None:
    condition = RowCondition(text, ORDERS)

    assert condition.can_match_deletes is can_match
    deleted = row(1, 0, op="d", before=[(2, "paid"), (6, "5")], after=None)
    kept = condition.matches(table_changes(ORDERS, "", table(deleted))).kept
    assert can_match or not len(kept)
