"""Signals through a real server and reader: a row or a message starts, rests, resumes and ends backfills."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog import Command
from cdc.errors import ConfigError
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction
from cdc.snapshot.debezium_signals import SIGNAL
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.snapshot.reader_with_backfills import Running, read_rows

ROWS = 100
INSERT = "INSERT INTO debezium_signal VALUES (%s, %s, %s)"
EMIT = "SELECT pg_logical_emit_message(%s, 'cdc.signal', %s::text)"
CHANNELS = ("row", "message", "lone message")


@pytest.fixture(name="running")
def _running(tmp_path: Path, database: str) -> Iterator[Running]:
    """A reader of a table with ROWS rows, and of a table of signals as Debezium's documents lay it down."""
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE debezium_signal (id VARCHAR(42) PRIMARY KEY, type VARCHAR(32) NOT NULL, data VARCHAR(2048) NULL)",
        "INSERT INTO t SELECT i, 'v' || i FROM generate_series(1, 100) i",
    )
    held = Captured(tmp_path, database)
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    held.write(
        slot=held.slot, more=f"snapshot: {{signals: public.debezium_signal, signal_secret: {{file: {secret}}}}}\n"
    )
    held.copy()
    with Running(held) as running:
        yield running


def send(running: Running, *signals: tuple[str, str, Any], channel: str = "row") -> None:
    """Signals (id, type, data) of one transaction."""
    with connect(running.held.dsn) as conn, conn.transaction():
        for name, kind, body in signals:
            if channel == "row":
                conn.execute(INSERT, [name, kind, None if body is None else json.dumps(body)])
            else:
                told = json.dumps({"id": name, "type": kind, "data": body, "secret": "s3cret"})
                conn.execute(EMIT, [channel == "message", told])


def done(running: Running, name: str) -> Command:
    """What came of the signal of that id."""

    def look() -> Command | None:
        noted = running.catalog.commands.ls("held", SIGNAL)
        return next((c for c in noted if c.payload["id"] == name and c.state != "pending"), None)

    found: Command = running.until(look)
    return found


def backfills(running: Running, name: str) -> list[int]:
    """The numbers that are in the result of the signal of that id."""
    result = done(running, name).result
    assert result is not None
    found: list[int] = result["backfills"]
    return found


def test_a_signal_of_each_channel_starts_a_backfill_that_completes(running: Running) -> None:
    body, jobs = {"data-collections": ["public.t"], "type": "incremental"}, list[int]()
    for channel in CHANNELS:
        before = len(read_rows(running.held))
        send(running, (channel, "execute-snapshot", body), channel=channel)
        (job,) = backfills(running, channel)
        assert running.ended(job).state == "done"
        assert len(read_rows(running.held)) == before + ROWS
        jobs.append(job)
    assert [c.id for c in reversed(running.catalog.commands.ls("held", BACKFILL))] == jobs


def test_a_filter_of_a_row_is_the_predicate_of_its_table_and_one_that_does_more_is_not_run(running: Running) -> None:
    dsn, before = running.held.dsn, len(read_rows(running.held))
    run_sql(dsn, "CREATE SEQUENCE s")
    conditions = [{"data-collection": "public.t", "filter": "id <= 7 AND v <> 'v3'"}]
    send(running, ("part", "execute-snapshot", {"data-collections": ["public.*"], "additional-conditions": conditions}))
    conditions = [{"data-collection": "public.t", "filter": "setval('s', 7) > 0"}]
    send(running, ("more", "execute-snapshot", {"data-collections": ["public.t"], "additional-conditions": conditions}))
    (job,) = backfills(running, "part")
    assert running.ended(job).state == "done"
    (job,) = backfills(running, "more")
    ended = running.ended(job)
    assert ended.result is not None
    assert (ended.state, ended.result["error"]["code"]) == ("failed", ConfigError.code)
    assert rows_of(dsn, "SELECT last_value, is_called FROM s") == [(1, False)]
    assert len(read_rows(running.held)) == before + 6


# through other channels a signal stands alone, so a backfill may be over before the next one
@pytest.mark.parametrize("channel", ["row", pytest.param("message", marks=pytest.mark.slow)])
def test_a_backfill_rests_goes_on_and_is_ended_as_signals_say(running: Running, channel: str) -> None:
    body, before = {"data-collections": ["public.t"]}, len(read_rows(running.held))
    send(running, ("1", "execute-snapshot", body), ("2", "pause-snapshot", None), channel=channel)
    (job,) = backfills(running, "1")
    assert backfills(running, "2") == [job]
    running.until(lambda: running.state(job) == "paused")
    assert len(read_rows(running.held)) == before
    send(running, ("3", "resume-snapshot", None), channel=channel)
    assert backfills(running, "3") == [job]
    assert running.ended(job).state == "done"
    send(running, ("4", "execute-snapshot", body), ("5", "pause-snapshot", None), channel=channel)
    (other,) = backfills(running, "4")
    running.until(lambda: running.state(other) == "paused")
    send(running, ("6", "stop-snapshot", {"type": "incremental", "data-collections": ["public.t"]}), channel=channel)
    ended = running.ended(other)
    assert ended.result is not None
    assert (ended.state, ended.result["state"]) == ("failed", "cancelled")
    assert len(read_rows(running.held)) == before + ROWS


def test_what_cannot_be_read_or_done_leaves_the_reader_at_work(running: Running) -> None:
    send(running, ("a", "nothing-known", {}), ("b", "execute-snapshot", {"type": "blocking"}), ("c", "log", None))
    run_sql(
        running.held.dsn,
        "SELECT pg_logical_emit_message(true, 'cdc.signal', '{')",
        "SELECT pg_logical_emit_message(false, 'cdc.signal', decode('ff00', 'hex'))",
        "INSERT INTO debezium_signal VALUES ('d', 'execute-snapshot', '{')",
        "UPDATE debezium_signal SET type = 'stop-snapshot' WHERE id = 'a'",
        "DELETE FROM debezium_signal WHERE id = 'c'",
    )
    send(running, ("last", "pause-snapshot", None), channel="message")
    assert done(running, "last").result == {"backfills": [], "left": []}
    noted = running.catalog.commands.ls("held", SIGNAL)
    assert [(c.payload["id"], c.state.value) for c in reversed(noted)] == [
        ("b", "failed"),
        ("d", "failed"),
        ("last", "done"),
    ]
    assert running.catalog.commands.ls("held", BACKFILL) == []
    assert running.catalog.commands.ls("held", BackfillAction.CANCEL.kind) == []
    running.caught_up()
