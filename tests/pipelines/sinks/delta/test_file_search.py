"""File search: finds the rows of keys in data files, and reads no row group whose statistics exclude them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from cdc.delta_protocol.table_storage import LocalStorage
from pipelines.sinks.delta.file_search import ROWS_AT_ONCE, WantedKeys, may_have_keys
from pipelines.sinks.delta.indexed.delta_log import LiveFile, LiveFiles
from pipelines.sinks.delta.indexed.key_hashes import hash_keys

SECRET = bytes(16)
GROUPS, GROUP_ROWS = 5, 4
COLUMNS = {
    "integer": pa.array(range(0, 40, 2), pa.int64()),
    "text": pa.array([f"key {number * 7 % 20}" for number in range(20)], pa.string()),
    "decimal": pa.array([number * 7 % 20 for number in range(20)], pa.decimal128(9, 2)),
}
"""Key columns of a file with 20 rows, as kinds of which the search compares values, or hashes only."""


def table_of(folder: Path) -> LiveFiles:
    """Return a table with one file of several row groups; every second row has an end."""
    rows = pa.table({**COLUMNS, "end": pa.array([None if number % 2 else 1 for number in range(20)], pa.int64())})
    table = DeltaTable.create(str(folder), rows.schema)
    pq.write_table(rows, folder / "part-0.parquet", row_group_size=GROUP_ROWS)
    action = AddAction("part-0.parquet", (folder / "part-0.parquet").stat().st_size, {}, 0, True, "{}")
    table.create_write_transaction([action], "append", table.schema(), [])
    return LiveFiles.read(LocalStorage(folder))


def find(
    files: LiveFiles, keys: pa.Table, null_column: str | None = None, rows_at_once: int = ROWS_AT_ONCE
) -> list[tuple[int, int]]:
    """Return (number of the key, row) of each row that is found."""
    hashes, _ = hash_keys(keys.columns, SECRET)
    wanted = WantedKeys(keys.column_names, keys, hashes, SECRET, null_column)
    found = wanted.find(files, [(7, file) for file in files.by_path.values()], rows_at_once)
    assert {*found.files.tolist()} <= {7}
    return sorted(zip(found.wanted.tolist(), found.rows.tolist(), strict=True))


@pytest.mark.parametrize("rows_at_once", [1, 7, 100])
@pytest.mark.parametrize("names", [("integer",), ("text",), ("decimal",), ("text", "integer"), ("decimal", "text")])
def test_every_row_of_a_key_is_found_and_no_other(names: tuple[str, ...], rows_at_once: int, tmp_path: Path) -> None:
    rows = np.array([19, 0, 7, 8, 3])
    keys = pa.table({name: COLUMNS[name].take(pa.array(rows)) for name in names})
    absent: dict[str, Any] = {"integer": 5, "text": "key", "decimal": 99}
    keys = pa.concat_tables([keys, pa.table({name: pa.array([absent[name]], keys[name].type) for name in names})])
    files = table_of(tmp_path)

    assert find(files, keys, None, rows_at_once) == [(number, row) for number, row in enumerate(rows.tolist())]
    assert find(files, keys, "end", rows_at_once) == [
        (number, row) for number, row in enumerate(rows.tolist()) if row % 2
    ]


def test_a_row_group_whose_statistics_exclude_all_keys_is_not_read(tmp_path: Path) -> None:
    files = table_of(tmp_path)
    (path,) = files.by_path
    content = (tmp_path / path).read_bytes()
    group = pq.ParquetFile(tmp_path / path).metadata.row_group(2).column(0)
    first = group.dictionary_page_offset or group.data_page_offset
    (tmp_path / path).write_bytes(content[:first] + b"\xff" * 8 + content[first + 8 :])
    beside, within = (pa.table({"integer": pa.array(numbers, pa.int64())}) for numbers in ([0, 14, 38, 15], [16]))

    assert find(files, beside) == [(0, 0), (1, 7), (2, 19)]
    with pytest.raises(OSError, match=r"thrift|Thrift|page"):
        find(files, within)


@pytest.mark.parametrize(
    ("least", "greatest", "may"), [(0, 9, False), (0, 10, True), (12, 12, True), (20, 30, True), (21, 30, False)]
)
def test_files_may_have_keys_within_their_bounds(least: int, greatest: int, may: bool) -> None:
    files = [file_with(1, 5), file_with(least, greatest)]

    assert may_have_keys(files, "integer", pa.chunked_array([[20, None], [10]])) == may


def test_a_file_without_bounds_and_keys_of_other_types_may_match() -> None:
    assert may_have_keys([file_with(1, 5), LiveFile({"path": "a", "stats": "{}"})], "integer", pa.chunked_array([[20]]))
    assert may_have_keys([file_with(1, 5)], "integer", pa.chunked_array([["20"]]))
    assert may_have_keys([file_with(1, 5)], "integer", pa.chunked_array([pa.nulls(2, pa.int64())]))


def file_with(least: int, greatest: int) -> LiveFile:
    """Return a file with these bounds of its key column."""
    statistics = {"minValues": {"integer": least}, "maxValues": {"integer": greatest}}
    return LiveFile({"path": "a", "stats": json.dumps(statistics)})
