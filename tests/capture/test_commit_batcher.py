"""Gathering: what one commit holds, and when it is due."""

from __future__ import annotations

import pyarrow as pa

from cdc.capture.commit_batcher import CHUNKS_PER_COMMIT, OPEN_LIMIT, CommitBatch, CommitBatcher, PendingRows
from cdc.change import LOG_SCHEMA
from cdc.log.durable_position import DurablePosition
from cdc.pgoutput.decoder_events import DecodedRows
from cdc.position import Position
from tests.log.rows import row, table

LINGER = 0.1
FREE = 5.0
"""When the last batch was appended."""
WIDE = [(1, "x" * (OPEN_LIMIT // 2 + 1))]
"""An image of which two are more than an open transaction may have in memory."""


def decoded(position: int, *, ended: bool = True, wide: bool = False, copied: bool = False) -> DecodedRows:
    """One row of a transaction."""
    (batch,) = table(row(position, after=WIDE if wide else [(1, "1")])).to_batches()
    last = Position(position) if ended else None
    return DecodedRows(batch, int(ended), last, committed_at=7, transactions=int(ended), copied=copied)


def gathering(commit_bytes: int = 1 << 20, reached: DurablePosition | None = None) -> CommitBatcher:
    reached = reached or DurablePosition()
    reached.advance(Position(1))
    return CommitBatcher(commit_bytes, LINGER, reached)


def told(batches: list[CommitBatch]) -> list[tuple[int, int | None]]:
    """(rows, last position) of each."""
    return [(sum(file.rows for file in one.files), None if one.end is None else int(one.end.last)) for one in batches]


def test_nothing_is_due_before_a_transaction_has_ended():
    rows = gathering()
    assert rows.next_due(FREE, more=False) is None
    rows.add(decoded(5, ended=False))
    assert rows.next_due(FREE, more=False) is None
    assert told(list(rows.batches(FREE + 1, FREE, more=False))) == []


def test_a_small_commit_is_due_once_the_one_before_it_has_lingered():
    rows = gathering()
    rows.add(decoded(5))
    rows.add(decoded(6))
    assert rows.next_due(FREE, more=False) == FREE + LINGER
    assert told(list(rows.batches(FREE, FREE, more=False))) == []
    assert told(list(rows.batches(FREE + LINGER, FREE, more=False))) == [(2, 6)]
    assert rows.next_due(FREE, more=False) is None


def test_what_comes_while_a_batch_is_appended_costs_no_commit_of_its_own():
    rows = gathering()
    rows.add(decoded(5))
    assert rows.next_due(None, more=False) is None
    assert told(list(rows.batches(FREE + 9, None, more=False))) == []
    rows.add(decoded(6))
    assert told(list(rows.batches(FREE + 9, FREE + 9 - LINGER, more=False))) == [(2, 6)]


def test_a_full_commit_waits_for_nothing():
    rows = gathering(commit_bytes=1)
    rows.add(decoded(5))
    assert told(list(rows.batches(FREE, None, more=False))) == [(1, 5)]


def test_a_chunk_of_a_copy_is_encoded_at_once_and_committed_with_what_comes():
    rows = gathering()
    rows.add(decoded(5, ended=False, copied=True))
    assert told(list(rows.batches(FREE, None, more=False))) == []
    for position in (5, 6):
        rows.add(decoded(position, copied=True))
        assert told(list(rows.batches(FREE, FREE, more=False)))[0][1] is None
    assert rows.next_due(FREE, more=False) == FREE + LINGER
    rows.add(decoded(7))
    assert told(list(rows.batches(FREE + LINGER, FREE, more=False))) == [(1, 7)]
    assert rows.next_due(FREE, more=False) is None


def test_what_somebody_waits_for_is_due_at_once_and_nothing_sooner():
    reached = DurablePosition()
    rows = gathering(reached=reached)
    dues: list[float | None] = []
    reached.on_wait(lambda: dues.append(rows.next_due(None, more=False)))
    rows.add(decoded(5))
    for position in (6, 5, 1):
        reached.wait(Position(position), 0)
    assert dues == [None, 0.0]
    rows.add(decoded(6))
    reached.wait(Position(6), 0)
    assert dues[2:] == [0.0]
    assert rows.next_due(None, more=False) is None


def test_what_somebody_waits_for_is_committed_with_what_arrived_by_then():
    reached = DurablePosition()
    rows = gathering(reached=reached)
    dues: list[float | None] = []
    reached.on_wait(lambda: dues.extend(rows.next_due(FREE, more=more) for more in (True, False)))
    rows.add(decoded(5))
    reached.wait(Position(5), 0)
    assert dues == [FREE + LINGER, 0.0]


def test_so_many_chunks_that_somebody_waits_for_are_a_commit_whatever_else_arrives():
    reached = DurablePosition()
    rows = gathering(reached=reached)
    dues: list[float | None] = []
    reached.on_wait(lambda: dues.append(rows.next_due(FREE, more=True)))
    for chunk in range(CHUNKS_PER_COMMIT):
        rows.add(decoded(5 + chunk, copied=True))
        assert told(list(rows.batches(FREE, FREE, more=True))) == [(1, None)]
        reached.wait(Position(5), 0)
    assert dues == [FREE + LINGER] * (CHUNKS_PER_COMMIT - 1) + [0.0]


def test_a_large_open_transaction_goes_out_in_parts_behind_what_has_ended():
    rows = gathering()
    rows.add(decoded(5))
    for _ in range(2):
        rows.add(decoded(6, ended=False, wide=True))
    assert told(list(rows.batches(FREE, None, more=False))) == [(1, 5), (2, None)]
    rows.add(decoded(6))
    assert told(list(rows.batches(FREE + LINGER, FREE, more=False))) == [(1, 6)]


def test_what_is_finished_is_given_out_at_the_end():
    rows = gathering()
    rows.add(decoded(5))
    rows.add(decoded(6, ended=False))
    assert told(list(rows.flush())) == [(1, 5)]
    assert told(list(rows.flush())) == []


EMPTY = pa.RecordBatch.from_pylist([], LOG_SCHEMA)


def decoded_rows(*positions: int, complete: int, last: int | None) -> DecodedRows:
    (rows,) = table(*(row(p, n) for n, p in enumerate(positions))).combine_chunks().to_batches() or [EMPTY]
    return DecodedRows(
        rows=rows, complete=complete, last=None if last is None else Position(last), committed_at=7, transactions=1
    )


def count(batches: list[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


def test_rows_of_an_open_transaction_are_not_ready():
    pending = PendingRows()
    pending.add(decoded_rows(5, 5, complete=0, last=None))
    assert pending.take_ready() is None
    assert pending.open_bytes > 0


def test_the_end_of_a_transaction_takes_its_earlier_rows_along():
    pending = PendingRows()
    pending.add(decoded_rows(5, 5, complete=0, last=None))
    pending.add(decoded_rows(5, 6, complete=1, last=5))
    ready = pending.take_ready()
    assert ready is not None
    rows, end = ready
    assert (count(rows), end.last) == (3, 5)
    assert count(pending.take_open()) == 1
    assert pending.take_ready() is None


def test_a_transaction_without_rows_still_moves_the_position():
    pending = PendingRows()
    pending.add(decoded_rows(complete=0, last=9))
    ready = pending.take_ready()
    assert ready is not None
    rows, end = ready
    assert (rows, end.last) == ([], 9)
