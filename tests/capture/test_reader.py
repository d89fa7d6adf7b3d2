"""Reader: what one start reports, and that a drain confirms what the log contains."""

from __future__ import annotations

from pathlib import Path

from cdc.capture.reader import Reader, ReaderContext, ReaderStart
from cdc.capture.settings import reader_settings
from cdc.postgres.connection import connect
from cdc.postgres.slot import slot_status
from tests.faults.capture import Captured
from tests.fixtures.postgres import drop_when_free, run_sql


def start_and_drain(pipeline: Captured) -> ReaderStart:
    """Run a reader whose stop is set before it starts."""
    context, starts = ReaderContext(), list[ReaderStart]()
    context.stop.set()
    Reader(reader_settings(pipeline.definition), context, starts.append).run()
    (start,) = starts
    assert context.durable.position == start.position
    return start


def test_the_first_start_copies_and_the_next_one_continues_the_log(tmp_path: Path, database: str) -> None:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    pipeline = Captured(tmp_path, database)
    try:
        first, second = start_and_drain(pipeline), start_and_drain(pipeline)
        assert first.copied is not None
        assert (first.copied.tables, first.copied.rows, second.copied) == (1, 2, None)
        assert first.position == second.position == pipeline.log.durable
        with connect(database) as conn:
            slot = slot_status(conn, pipeline.slot)
        assert slot is not None
        assert slot.confirmed_flush is not None
        assert slot.confirmed_flush <= second.position.lsn + 1
    finally:
        with connect(database) as conn:
            drop_when_free(conn, pipeline.slot)
