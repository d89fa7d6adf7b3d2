"""Rows that another process encoded: placed in the log, they are those rows at that place, in an ordinary file."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import LogCorrupt
from cdc.log.disk_format import GROUP, delta_statistics
from cdc.log.encoded_chunk import PLACE_COLUMNS, EncodedChunk, PlacedChunk
from cdc.log.table_io import encode
from cdc.log.writer import encode_files
from cdc.log_row import LOG_SCHEMA, RowOrder

PLACE = RowOrder(position=(3 << 52) + 77, ordinal=5, xid=901, committed_at=1_700_000_000_123_456)
TEXTS = st.one_of(st.none(), st.text(max_size=4), st.just("x" * 300))


def read_rows(values: list[str | None]) -> pa.Table:
    """Rows of LOG_SCHEMA of operation `r`, one per value, whose key is their number."""
    blank = dict.fromkeys(LOG_SCHEMA.names) | dict.fromkeys(PLACE_COLUMNS, 0) | {"partial": False, "op": "r"}
    rows = [
        blank | {"relation": 16_384, "topic": "public.t", "key": [str(n)], "after": [(1, str(n)), (2, value)]}
        for n, value in enumerate(values)
    ]
    return pa.Table.from_pylist(rows, LOG_SCHEMA)


def placed(rows: pa.Table, order: RowOrder) -> pa.Table:
    """The rows at their place, column by column."""
    count = rows.num_rows
    columns = {
        "position": pa.array([order.position] * count),
        "ordinal": pa.array(range(order.ordinal, order.ordinal + count), pa.int64()),
        "xid": pa.array([order.xid] * count),
        "committed_at": pa.array([order.committed_at] * count, LOG_SCHEMA.field("committed_at").type),
    }
    return pa.table([columns.get(name, rows[name]) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA)


def chunk_of(rows: pa.Table, group: int = GROUP) -> EncodedChunk:
    return EncodedChunk.parse(bytes(encode(rows, group=group)), 16_384)


@given(values=st.lists(TEXTS, min_size=1, max_size=40), group=st.integers(1, 17), kept=st.sets(st.integers(0, 39)))
def test_placed_row_groups_are_their_rows_at_their_place(values: list[str | None], group: int, kept: set[int]) -> None:
    rows = read_rows(values)
    chunk = chunk_of(rows, group)
    groups = tuple(sorted({number % len(chunk.group_rows) for number in kept or {0}}))

    file = PlacedChunk(chunk, groups, PLACE).encode()

    expected = placed(chunk.table(groups), PLACE)
    written = pq.ParquetFile(pa.BufferReader(file.content), page_checksum_verification=True)
    assert written.read().equals(expected)
    assert file.rows == expected.num_rows
    assert json.loads(file.statistics) == json.loads(delta_statistics(expected))
    assert sum(map(len, chunk.group_keys())) == len(values)


def test_a_placed_file_is_byte_for_byte_the_file_that_the_writer_encodes() -> None:
    rows = read_rows([f"value {n}" for n in range(2 * GROUP + 100)])

    file = PlacedChunk(chunk_of(rows), (0, 1, 2), PLACE).encode()

    (expected,) = encode_files(placed(rows, PLACE))
    assert bytes(file.content) == bytes(expected.content)
    assert file.statistics == expected.statistics


def test_a_file_that_is_none_of_log_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"position": [1]}), path)

    with pytest.raises(LogCorrupt, match="columns of a log row"):
        EncodedChunk.parse(path.read_bytes(), 1)
    with pytest.raises(LogCorrupt, match="not a Parquet file"):
        EncodedChunk.parse(b"PAR1", 1)
