"""The log's storage takes no more: reading pauses, the stream stays, and all goes on when there is room."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cdc.errors import LogUnwritable
from cdc.log.disk_format import CommitInfo
from cdc.log.reader import LogReader
from cdc.log.retrying_writer import RetryingWriter, is_storage_failure
from cdc.log.writer import LogWriter
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.faults.capture import Captured, ReaderProcess, rows_with
from tests.fixtures.disk import small_file_system
from tests.fixtures.postgres import run_sql
from tests.fixtures.postgres_programs import MAIN_VERSION
from tests.fixtures.waiting import until
from tests.log.rows import IDENTITY, LIMITS, row


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB, where the log will be."""
    with small_file_system(tmp_path / "log") as place:
        yield place


def test_a_reader_waits_for_room_without_losing_its_stream_and_goes_on(small: Path, either_database: str) -> None:
    run_sql(either_database, "CREATE TABLE t (id int PRIMARY KEY, v text)")
    held = Captured(small.parent, either_database)
    held.copy()
    ballast = small / "ballast"
    ballast.write_bytes(bytes(5 << 20))
    with ReaderProcess(held) as reader:
        run_sql(
            either_database,
            "INSERT INTO t SELECT i, (SELECT string_agg(md5(i::text || n::text), '') FROM generate_series(1, 40) n) "
            "FROM generate_series(1, 4000) i",
        )
        until(lambda: LogUnwritable.code in reader.output(), reader.output)
        before = sender_of(held)
        Event().wait(3)  # it stays so, and the server hears of us all the time
        assert sender_of(held) == before
        spent = cpu_seconds(reader.child.pid)
        Event().wait(2)
        assert cpu_seconds(reader.child.pid) - spent < 1.0
        ballast.unlink()
        end = held.wal_end()
        until(lambda: held.holds(end), reader.output)
        assert len(held.folded("t")) == 4000
        assert sender_of(held) == before
        assert reader.child.poll() is None


@pytest.fixture(name="server", params=[MAIN_VERSION, pytest.param(15, marks=pytest.mark.slow)])
def _server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """One that the test may stop."""
    request.getfixturevalue({MAIN_VERSION: "postgres", 15: "postgres_15"}[request.param])  # skips without the programs
    with EmbeddedPostgres(tmp_path / "pg", version=request.param, tcp=True) as server:
        yield server


@pytest.mark.parametrize("megabytes", [pytest.param(5, marks=pytest.mark.slow), 50])
def test_a_server_stops_while_the_disk_of_the_log_is_full_and_nothing_is_lost(
    small: Path, server: EmbeddedPostgres, megabytes: int
) -> None:
    """The more text waits in the reader's memory, then in the socket, so that keepalives are not even read."""
    rows, times = 4_000, 8 * megabytes  # of the 32 characters of md5
    run_sql(server.dsn(), "CREATE TABLE t (id int PRIMARY KEY, v text)")
    held = Captured(small.parent, server.dsn(), slot="s_full")
    held.copy()
    ballast = small / "ballast"
    with ReaderProcess(held) as reader:
        run_sql(held.dsn, "INSERT INTO t VALUES (0, 'before')")
        until(lambda: held.folded("t"), reader.output)
        with suppress(OSError):  # all that there is
            ballast.write_bytes(bytes(8 << 20))
        with connect(held.dsn) as conn:
            conn.execute(
                "INSERT INTO t SELECT i, repeat(md5(i::text), %s) FROM generate_series(1, %s) i", [times, rows]
            )
        until(lambda: LogUnwritable.code in reader.output(), reader.output)
        sender_of(held)
        began = time.monotonic()
        server.stop("fast")
        assert time.monotonic() - began < 15
        server.start()
        ballast.unlink()
        end = held.wal_end()
        until(lambda: held.holds(end), reader.output)
        assert reader.child.poll() is None
    assert len(held.folded("t")) == rows + 1
    assert len(rows_with(held.log, pc.field("op") == "c", "position")) == rows + 1


def sender_of(held: Captured) -> object:
    """The walsender that streams to us: another one would mean that the stream broke."""
    with connect(held.dsn) as conn:
        found = conn.execute("SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", [held.slot]).fetchone()
    assert found is not None
    assert found[0] is not None
    return found[0]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_what_a_broken_attempt_began_is_given_back_and_the_commit_is_whole(small: Path) -> None:
    LogWriter.open(small, IDENTITY, LIMITS)
    told: list[bool] = []
    ballast = small / "ballast"
    ballast.write_bytes(bytes(7 << 20))
    stop = Event()

    def blocked(on: bool) -> None:
        told.append(on)
        if on:
            ballast.unlink()

    writer = RetryingWriter(small, LIMITS, stop, blocked)
    big = pa.Table.from_pylist([row(100, n) for n in range(8)], LOG_SCHEMA)
    big = big.set_column(big.schema.get_field_index("payload"), "payload", pa.array([os.urandom(250_000)] * 8))
    files = writer.stage(big)
    writer.commit(files, CommitInfo(last=Position(100), committed_at=1, timeline=1))

    assert told == [True, False]
    on_disk = {str(p) for p in (small / "changes").rglob("*.parquet") if "_delta_log" not in str(p)}
    assert on_disk == {file.path for file in LogReader(small).every_file()}
    assert LogReader(small).durable == 100


def test_a_writer_that_is_told_to_stop_does_not_wait_for_room(small: Path) -> None:
    LogWriter.open(small, IDENTITY, LIMITS)
    (small / "ballast").write_bytes(bytes(7 << 20))
    stop = Event()
    stop.set()
    writer = RetryingWriter(small, LIMITS, stop, lambda _on: None)
    big = pa.Table.from_pylist([row(100, n) for n in range(8)], LOG_SCHEMA)
    big = big.set_column(big.schema.get_field_index("payload"), "payload", pa.array([os.urandom(250_000)] * 8))
    with pytest.raises(LogUnwritable, match="No space left"):
        writer.stage(big)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), True),
        (OSError(5, "Input/output error"), True),
        (OSError(30, "Read-only file system"), True),
        (OSError(2, "No such file or directory"), False),
        (ValueError("No such column"), False),
        (pa.ArrowInvalid("Error writing: Disk quota exceeded"), True),
    ],
)
def test_only_what_may_go_by_itself_is_waited_for(error: Exception, expected: bool) -> None:
    assert is_storage_failure(error) is expected
