"""What the log of a reader says while all is well: copied, streaming, connected again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.capture import Captured, ReaderProcess
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 3)")
    return Captured(tmp_path, database)


def has_line(reader: ReaderProcess, pattern: str) -> bool:
    return re.search(pattern, COLOURS.sub("", reader.output())) is not None


END_STREAM = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{}'"


def test_a_reader_says_that_it_copied_streams_and_is_connected_again(held: Captured) -> None:
    with ReaderProcess(held) as reader:
        until(
            lambda: has_line(
                reader,
                r"initial snapshot done +copied_while_streaming=0 position=[0-9A-F]+/[0-9A-F]+ rows=3 tables=1",
            ),
            reader.output,
        )
        until(
            lambda: has_line(reader, r"streaming changes from the source +position=[0-9A-F]+/[0-9A-F]+"), reader.output
        )
        run_sql(held.dsn, END_STREAM.format(held.slot))
        until(lambda: has_line(reader, r"connected to the source again +after_seconds=\S+ position=\S+"), reader.output)
