"""Rows on disk: the table is the same, takes no memory of its own, and leaves no file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from pipelines.sinks.search.rows_on_disk import on_disk

SCHEMA = pa.schema({"key": pa.list_(pa.string()), "after": pa.map_(pa.int32(), pa.string())})


def test_the_rows_of_all_parts_are_read_back(tmp_path: Path) -> None:
    parts = [
        pa.table({"key": [["1"], ["2"]], "after": [[(1, "a")], None]}, SCHEMA),
        pa.table({"key": [["3"]], "after": [[(1, "b")]]}, SCHEMA),
    ]

    rows = on_disk(parts, tmp_path)

    assert rows == pa.concat_tables(parts)
    assert list(tmp_path.iterdir()) == []


def test_the_rows_are_not_in_the_memory_of_arrow(tmp_path: Path) -> None:
    before = pa.total_allocated_bytes()

    rows = on_disk((pa.table({"number": range(start, start + 1_000)}) for start in range(0, 100_000, 1_000)), tmp_path)

    assert rows is not None
    assert rows.num_rows == 100_000
    assert pa.total_allocated_bytes() - before < 100_000


def test_no_parts_give_no_table(tmp_path: Path) -> None:
    assert on_disk([], tmp_path) is None
