"""Commit batcher: when a commit is due, what it contains, and when the log may be trimmed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pyarrow as pa
import pytest

from cdc.byte_queue import ByteQueue, QueueClosed
from cdc.capture.commit_batcher import (
    BUSY_LINGER,
    CHUNKS_PER_COMMIT,
    OPEN_LIMIT,
    QUIET,
    CommitBatch,
    CommitBatcher,
    DurablePosition,
    PendingRows,
)
from cdc.log_row import LOG_SCHEMA
from cdc.pgoutput.decoder_events import DecodedRows
from cdc.position import Position
from tests.log.rows import row, table

LINGER = 0.1
WIDE = [(1, "x" * (OPEN_LIMIT // 2 + 1))]
"""Two rows with this image exceed the limit of an open transaction in memory."""


def decoded(position: int, *, ended: bool = True, wide: bool = False, copied: bool = False) -> DecodedRows:
    """One row of a transaction."""
    (batch,) = table(row(position, after=WIDE if wide else [(1, "1")])).to_batches()
    last = Position(position) if ended else None
    return DecodedRows(batch, int(ended), last, committed_at=7, transactions=int(ended), copied=copied)


def new_batcher(commit_bytes: int = 1 << 20, durable: DurablePosition | None = None) -> CommitBatcher:
    """A batcher whose append stage is free since time 0."""
    durable = durable or DurablePosition()
    durable.advance(Position(1))
    return CommitBatcher(commit_bytes, LINGER, durable, ByteQueue[DecodedRows](1).wake)


def take(batcher: CommitBatcher, now: float, *, more: bool = False, appended: bool = True) -> list[tuple[int, int]]:
    """(rows, last position) of each batch that is due, 0 without an end; appended: the append stage writes them."""
    batches = list(batcher.batches(now, more=more))
    for _ in batches if appended else ():
        batcher.record_append(now)
    return summary(batches)


def summary(batches: list[CommitBatch]) -> list[tuple[int, int]]:
    return [(sum(file.rows for file in one.files), 0 if one.end is None else int(one.end.last)) for one in batches]


def test_nothing_is_due_before_a_transaction_has_ended():
    batcher = new_batcher()
    assert batcher.next_due(more=False) is None
    batcher.add(decoded(5, ended=False), 0.0)
    assert batcher.next_due(more=False) is None
    assert take(batcher, 1.0) == []


def test_a_small_commit_is_due_after_the_linger_time():
    batcher = new_batcher()
    batcher.add(decoded(5), 0.0)
    batcher.add(decoded(6), 0.0)
    assert batcher.next_due(more=False) == LINGER
    assert take(batcher, 0.0) == []
    assert take(batcher, LINGER) == [(2, 6)]
    assert batcher.next_due(more=False) is None


def test_a_commit_with_many_rows_is_due_after_a_pause_or_the_longer_linger_time() -> None:
    batcher = new_batcher(commit_bytes=4 * OPEN_LIMIT)
    batcher.add(decoded(5, wide=True), 0.01)
    assert batcher.next_due(more=False) == pytest.approx(0.01 + QUIET)
    for number in range(1, 5):
        batcher.add(decoded(5 + number), number * LINGER)
        assert batcher.next_due(more=False) == pytest.approx(min(number * LINGER + QUIET, BUSY_LINGER * LINGER))
    assert take(batcher, BUSY_LINGER * LINGER) == [(5, 9)]


def test_a_commit_with_many_rows_is_due_at_once_when_the_source_has_no_more() -> None:
    batcher = new_batcher(commit_bytes=4 * OPEN_LIMIT)
    batcher.add(decoded(5), 0.01)
    batcher.record_decoded(source_is_idle=True)
    assert batcher.next_due(more=False) == LINGER
    batcher.add(decoded(6, wide=True), 0.01)
    assert batcher.next_due(more=True) == pytest.approx(0.01 + QUIET)
    assert take(batcher, 0.01, appended=False) == [(2, 6)]
    batcher.add(decoded(7, wide=True), 0.02)
    assert batcher.next_due(more=False) is None
    batcher.record_append(0.03)
    batcher.record_decoded(source_is_idle=False)
    assert batcher.next_due(more=False) == pytest.approx(0.02 + QUIET)


def test_rows_that_arrive_while_a_batch_is_appended_share_one_commit():
    batcher = new_batcher()
    batcher.add(decoded(5), 0.0)
    assert take(batcher, LINGER, appended=False) == [(1, 5)]
    batcher.add(decoded(6), 0.0)
    assert batcher.next_due(more=False) is None
    assert take(batcher, 9.0) == []
    batcher.record_append(9.0)
    batcher.add(decoded(7), 0.0)
    assert batcher.next_due(more=False) == 9.0 + LINGER
    assert take(batcher, 9.0 + LINGER) == [(2, 7)]


def test_a_commit_of_full_size_is_due_at_once():
    batcher = new_batcher(commit_bytes=1)
    for position in (5, 6):
        batcher.add(decoded(position), 0.0)
        assert take(batcher, 0.0, appended=False) == [(1, position)]


def test_a_chunk_is_encoded_at_once_and_committed_with_later_rows():
    batcher = new_batcher()
    batcher.add(decoded(5, ended=False, copied=True), 0.0)
    assert take(batcher, 0.0) == []
    for position, rows in ((5, 2), (6, 1)):
        batcher.add(decoded(position, copied=True), 0.0)
        assert take(batcher, 0.0) == [(rows, 0)]
    assert batcher.next_due(more=False) == LINGER
    batcher.add(decoded(7), 0.0)
    assert take(batcher, LINGER) == [(1, 7)]
    assert batcher.next_due(more=False) is None


def test_only_a_position_that_a_thread_waits_for_is_due_at_once():
    durable = DurablePosition()
    batcher, dues = new_batcher(durable=durable), list[float | None]()
    batcher.add(decoded(4), 0.0)
    take(batcher, LINGER, appended=False)
    with durable.waking(lambda: dues.append(batcher.next_due(more=False))):
        batcher.add(decoded(5), 0.0)
        for position in (6, 5, 1):
            durable.wait(Position(position), 0)
        assert dues == [None, 0.0]
        batcher.add(decoded(6), 0.0)
        durable.wait(Position(6), 0)
    assert dues[2:] == [0.0]
    assert batcher.next_due(more=False) is None


def test_a_commit_that_a_thread_waits_for_contains_the_rows_that_are_queued():
    durable = DurablePosition()
    batcher, dues = new_batcher(durable=durable), list[float | None]()
    batcher.add(decoded(5), 0.0)
    with durable.waking(lambda: dues.extend(batcher.next_due(more=more) for more in (True, False))):
        durable.wait(Position(5), 0)
    assert dues == [LINGER, 0.0]


def test_several_chunks_that_a_thread_waits_for_are_committed_whatever_is_queued():
    durable = DurablePosition()
    batcher, dues = new_batcher(durable=durable), list[float | None]()
    with durable.waking(lambda: dues.append(batcher.next_due(more=True))):
        for chunk in range(CHUNKS_PER_COMMIT):
            batcher.add(decoded(5 + chunk, copied=True), 0.0)
            assert take(batcher, 0.0, more=True) == [(1, 0)]
            durable.wait(Position(5), 0)
    assert dues == [LINGER] * (CHUNKS_PER_COMMIT - 1) + [0.0]


def test_a_large_open_transaction_is_encoded_in_parts_after_the_finished_ones():
    batcher = new_batcher()
    batcher.add(decoded(5), 0.0)
    for _ in range(2):
        batcher.add(decoded(6, ended=False, wide=True), 0.0)
    assert take(batcher, 0.0) == [(1, 5), (2, 0)]
    batcher.add(decoded(6), 0.0)
    assert take(batcher, LINGER) == [(1, 6)]


def test_a_flush_contains_finished_transactions_only():
    batcher = new_batcher()
    batcher.add(decoded(5), 0.0)
    batcher.add(decoded(6, ended=False), 0.0)
    assert summary(list(batcher.flush())) == [(1, 5)]
    assert summary(list(batcher.flush())) == []


def test_a_requested_trim_is_possible_once_while_no_data_file_waits():
    batcher = CommitBatcher(1, LINGER, DurablePosition(), lambda: None)
    batcher.request_trim()
    assert [batch.is_trim for batch in batcher.batches(0.0, more=False)] == [True]
    assert list(batcher.batches(0.0, more=False)) == []


def test_a_trim_does_not_delay_the_next_commit():
    batcher = CommitBatcher(1 << 20, LINGER, DurablePosition(), lambda: None)
    batcher.request_trim()
    assert len(list(batcher.batches(0.0, more=False))) == 1
    batcher.add(decoded(5), 0.0)
    assert batcher.next_due(more=False) == LINGER


def test_no_trim_is_possible_between_a_data_file_and_its_commit():
    batcher = CommitBatcher(1 << 20, LINGER, DurablePosition(), lambda: None)
    batcher.add(decoded(5, copied=True), 0.0)
    assert take(batcher, 0.0) == [(1, 0)]
    batcher.request_trim()
    assert list(batcher.batches(0.0, more=False)) == []
    (commit,) = batcher.batches(LINGER, more=False)
    assert commit.end is not None  # the append stage trims after it
    assert list(batcher.batches(LINGER, more=False)) == []


def test_an_appended_batch_and_a_requested_trim_wake_the_encode_stage():
    rows = ByteQueue[DecodedRows](1)
    batcher = CommitBatcher(1, LINGER, DurablePosition(), rows.wake)
    for report in (lambda: batcher.record_append(0.0), batcher.request_trim, batcher.check_again):
        report()
        assert rows.get(60) is None
    rows.close()
    batcher.record_append(1.0)
    with pytest.raises(QueueClosed):
        batcher.request_trim()


def test_a_durable_position_is_not_waited_for():
    durable, woken = DurablePosition(), list[int]()
    durable.advance(Position(5))
    with durable.waking(lambda: woken.append(1)):
        assert durable.wait(Position(5), 0)
    assert woken == []


def test_a_thread_waits_until_its_position_is_durable_or_the_time_is_over():
    durable, waits = DurablePosition(), Event()
    with durable.waking(waits.set), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(durable.wait, Position(7), 60.0)
        assert waits.wait(60)
        assert durable.is_awaited(Position(6), Position(7))
        assert not durable.is_awaited(Position(7), Position(9))
        assert not durable.is_awaited(Position(1), Position(6))
        durable.advance(Position(6))
        assert not waiting.done()
        durable.advance(Position(8))
        assert waiting.result(60)
    assert not durable.is_awaited(Position(0), Position(99))
    assert not durable.wait(Position(9), 0)
    assert durable.position == 8


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


def test_the_end_of_a_transaction_makes_its_earlier_rows_ready():
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
