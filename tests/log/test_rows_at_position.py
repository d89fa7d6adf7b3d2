"""Rows of one position: dense ordinals, one commit, and rows that are taken back."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from cdc.log.disk_format import CommitSource
from cdc.log.reader import LogReader
from cdc.log.rows_at_position import STAGE_BYTES, RowsAtPosition
from cdc.log.writer import LogWriter
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from cdc.table import TableSchema
from tests.log.rows import IDENTITY, LIMITS, row, schema_of

AT = Position(20)
SOURCE = CommitSource(1, "7000", 5)
TABLE = schema_of(7, "note")


@pytest.fixture(name="rows")
def _rows(tmp_path: Path) -> RowsAtPosition:
    return RowsAtPosition(LogWriter.open(tmp_path, IDENTITY, LIMITS), AT, 1_000)


def one(rows: RowsAtPosition, note: str = "x") -> pa.RecordBatch:
    """The next row of the table."""
    made = row(AT, rows.number, relation=7, op="r", after=[(1, str(rows.number)), (2, note)])
    return pa.RecordBatch.from_pylist([made], LOG_SCHEMA)


def places(root: Path) -> list[tuple[int, str]]:
    reader = LogReader(root)
    return sorted((r["ordinal"], r["op"]) for batch in reader.rows(Position(0), AT) for r in batch.to_pylist())


def add_and_fail(rows: RowsAtPosition, schema: TableSchema) -> None:
    with rows.all_or_none():
        rows.add_version(schema)
        rows.add(one(rows, "x" * STAGE_BYTES))
        raise ValueError("half")


def test_all_rows_are_one_commit_with_dense_ordinals(rows: RowsAtPosition, tmp_path: Path) -> None:
    rows.add_version(TABLE)
    rows.add(one(rows))
    rows.add_end(TABLE)
    rows.commit(SOURCE, views="{}")

    assert places(tmp_path) == [(0, "s"), (1, "r"), (2, "g")]
    last = LogReader(tmp_path).last_commit
    assert last is not None
    assert (last.last, last.rows, last.committed_at, last.publication, last.views) == (AT, 3, 1_000, 5, "{}")


def test_many_rows_are_written_before_the_commit(rows: RowsAtPosition, tmp_path: Path) -> None:
    rows.add(one(rows, "x" * STAGE_BYTES))
    assert len(list(tmp_path.glob("changes/segment=*/*.parquet"))) == 1
    rows.commit(SOURCE)
    assert places(tmp_path) == [(0, "r")]


def test_rows_of_a_block_that_fails_are_taken_back_with_their_files(rows: RowsAtPosition, tmp_path: Path) -> None:
    rows.add(one(rows))
    with pytest.raises(ValueError, match="half"):
        add_and_fail(rows, TABLE)
    rows.add(one(rows))
    rows.commit(SOURCE)

    assert places(tmp_path) == [(0, "r"), (1, "r")]
    assert len(list(tmp_path.glob("changes/segment=*/*.parquet"))) == 2
