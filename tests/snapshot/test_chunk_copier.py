"""Chunk reader: the deletions that it writes for listed keys without a row."""

from __future__ import annotations

from cdc.log_row import LOG_SCHEMA
from cdc.snapshot.chunk_copier import deletion_rows
from tests.pgoutput.streams import ORDERS, table


def test_a_listed_key_without_a_row_becomes_a_deletion_as_the_stream_sends_it() -> None:
    rows = deletion_rows(ORDERS, [("7",), ("8",)])
    assert rows.schema.names == LOG_SCHEMA.names
    (row, other) = rows.to_pylist()
    assert (row["relation"], row["topic"], row["op"]) == (ORDERS.relation, ORDERS.topic, "d")
    assert (row["key"], row["before"], row["after"], row["partial"]) == (["7"], [(10, "7")], None, False)
    assert other["key"] == ["8"]


def test_the_old_image_of_a_deletion_has_its_key_columns_in_table_order() -> None:
    (row,) = deletion_rows(table(key=(2, 0)), [("c", "a")]).to_pylist()
    assert (row["key"], row["before"]) == (["c", "a"], [(10, "a"), (12, "c")])
