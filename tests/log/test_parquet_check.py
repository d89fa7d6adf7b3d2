"""Integrity check of a file: it is read part by part, and an unreadable part is named with what is known of it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc.log import parquet_check
from cdc.log.disk_format import PARQUET
from cdc.log.parquet_check import tables_suffix
from tests.log.file_damage import flip_byte, page_of
from tests.log.rows import row, table


def write(path: Path, rows: pa.Table, group: int = 100) -> Path:
    pq.write_table(rows, path, row_group_size=group, **PARQUET)
    return path


def test_large_files_are_read_part_by_part(tmp_path: Path) -> None:
    path = write(tmp_path / "large.parquet", table(*(row(110, n) for n in range(300))))
    parts: list[int] = []
    found = parquet_check.read(path, lambda part: parts.append(part.num_rows))
    assert (parts, found.unread, found.has_checksums) == ([100, 100, 100], (), True)


def test_a_damaged_column_is_named_with_the_positions_of_its_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(row(110), row(120)))
    flip_byte(path, page_of(path, "after"))
    (part,) = parquet_check.read(path, lambda _rows: None).unread
    assert "columns after" in part.message
    assert (part.first, part.last, part.relations) == (110, 120, frozenset({16384}))


def test_a_file_without_footer_or_with_other_columns_is_one_unreadable_part(tmp_path: Path) -> None:
    cut, other = tmp_path / "cut.parquet", write(tmp_path / "other.parquet", pa.table({"id": [1]}))
    cut.write_bytes(b"PAR1")
    for path, words in ((cut, "footer of the file cannot be read"), (other, "the columns id, not those of the log")):
        (part,) = parquet_check.read(path, lambda _rows: None).unread
        assert words in part.message


def test_a_missing_file_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        parquet_check.read(tmp_path / "missing.parquet", lambda _rows: None)


def test_many_tables_are_counted() -> None:
    assert tables_suffix([]) == ""
    assert tables_suffix(["b", "a"]) == "; tables a, b"
    assert tables_suffix([f"t{n}" for n in range(8)]) == "; tables t0, t1, t2, t3, t4 and 3 more"
