"""Conditions over changes: which are true, which are unknown, and which cannot be evaluated."""

from __future__ import annotations

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


def test_the_engine_reads_no_files() -> None:
    condition = RowCondition("after.status = 'paid'", ORDERS)
    with pytest.raises(Exception, match="disabled"):
        condition._engine.sql("SELECT * FROM read_text('/etc/hostname')").fetchall()
