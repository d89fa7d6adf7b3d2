"""read_to_end: the log has everything that committed, and sessions that still write are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.capture.former_source import read_to_end
from cdc.errors import SlotInUse, SourceStillWritten
from cdc.postgres.connection import connect
from tests.faults.capture import Captured, capture_table
from tests.faults.write_load import Load
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    return capture_table(tmp_path, database)


def test_the_log_has_every_transaction_and_may_be_read_again(held: Captured) -> None:
    run_sql(held.dsn, "INSERT INTO t VALUES (1)", "INSERT INTO t VALUES (2)")
    first = read_to_end(held.definition)
    assert (held.folded("t"), held.log.durable) == ([("1",), ("2",)], first)
    assert read_to_end(held.definition) > first


def test_an_open_transaction_is_named(held: Captured) -> None:
    with connect(held.dsn, autocommit=False) as writing:
        writing.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(SourceStillWritten, match=rf"still open.*pid {writing.info.backend_pid}"):
            read_to_end(held.definition, 0.2)
        writing.commit()
    read_to_end(held.definition)
    assert held.folded("t") == [("1",)]


def test_a_table_that_is_changed_meanwhile_is_named(held: Captured) -> None:
    run_sql(held.dsn, "ALTER TABLE t ADD v text")
    with Load(held.dsn) as load:
        until(lambda: load.transactions > 2, "the load")
        with pytest.raises(SourceStillWritten, match=r"still changes public\.t"):
            read_to_end(held.definition)


def test_a_reader_that_runs_has_to_be_stopped_first(held: Captured) -> None:
    with held.reading() as reading:
        reading.caught_up()
        with pytest.raises(SlotInUse, match="is in use"):
            read_to_end(held.definition)
