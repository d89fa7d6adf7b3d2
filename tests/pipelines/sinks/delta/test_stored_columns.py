"""Stored columns: which columns of a data file are read, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc.errors import TargetDamaged
from pipelines.sinks.delta.stored_columns import StoredColumns, first_rows, open_data_file

PRESENT = pa.schema([("id", pa.int32()), ("added", pa.string()), ("unread", pa.string())])
WANTED = pa.schema([("added", pa.string()), ("id", pa.int64()), ("new", pa.string())])
STORED = StoredColumns.of(PRESENT, WANTED)


def test_each_row_group_has_the_wanted_columns_and_nulls_where_the_file_is_older(tmp_path: Path) -> None:
    rows = pa.table({"id": pa.array([1, 2, 3], pa.int32()), "unread": ["a", "b", "c"]})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=2)
    with open_data_file(str(tmp_path), "a.parquet") as content:
        groups = [(first, STORED.rows_of_group(content, group)) for group, first in first_rows(content)]

    assert [(first, table["id"].to_pylist()) for first, table in groups] == [(0, [1, 2]), (2, [3])]
    assert all(table.schema == WANTED for _, table in groups)
    assert all(table[name].null_count == table.num_rows for _, table in groups for name in ("added", "new"))


def test_only_the_needed_columns_are_read() -> None:
    assert STORED.read_columns.names == ["added", "id"]
    assert STORED.only(["new", "id"]).read_columns.names == ["id"]
    assert STORED.only(["new", "id"]).schema.names == ["new", "id"]


def test_a_file_that_is_no_parquet_is_damage(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"any")
    with pytest.raises(TargetDamaged, match="damaged or missing"), open_data_file(str(tmp_path), "a.parquet"):
        pass
