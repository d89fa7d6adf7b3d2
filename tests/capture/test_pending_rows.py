"""Pending: a transaction moves as a whole."""

from __future__ import annotations

import pyarrow as pa

from cdc.capture.pending_rows import PendingRows
from cdc.change import LOG_SCHEMA
from cdc.pgoutput.decoder_events import Decoded
from cdc.position import Position
from tests.log.rows import row, table

EMPTY = pa.RecordBatch.from_pylist([], LOG_SCHEMA)


def decoded(*positions: int, complete: int, last: int | None) -> Decoded:
    (rows,) = table(*(row(p, n) for n, p in enumerate(positions))).combine_chunks().to_batches() or [EMPTY]
    return Decoded(
        rows=rows, complete=complete, last=None if last is None else Position(last), committed_at=7, transactions=1
    )


def count(batches: list[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


def test_rows_of_an_open_transaction_are_not_ready():
    pending = PendingRows()
    pending.add(decoded(5, 5, complete=0, last=None))
    assert pending.take_ready() is None
    assert pending.open_bytes > 0


def test_the_end_of_a_transaction_takes_its_earlier_rows_along():
    pending = PendingRows()
    pending.add(decoded(5, 5, complete=0, last=None))
    pending.add(decoded(5, 6, complete=1, last=5))
    ready = pending.take_ready()
    assert ready is not None
    rows, end = ready
    assert (count(rows), end.last) == (3, 5)
    assert count(pending.take_open()) == 1
    assert pending.take_ready() is None


def test_a_transaction_without_rows_still_moves_the_position():
    pending = PendingRows()
    pending.add(decoded(complete=0, last=9))
    ready = pending.take_ready()
    assert ready is not None
    rows, end = ready
    assert (rows, end.last) == ([], 9)
