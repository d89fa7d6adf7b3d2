"""Standbys: one that is captured from, where nothing is written, and one that copies of its primary have regard for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import LiteralString

import pytest

from cdc.capture.startup_checks import find_problems
from cdc.errors import LogError
from cdc.postgres.chunk_queries import replay_lag
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.snapshot.backfill_documents import BackfillRequest
from tests.faults.capture import Captured, ReaderProcess
from tests.faults.test_new_epoch import restore
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.postgres_programs import MAIN_VERSION, needs_version
from tests.fixtures.waiting import until
from tests.snapshot.reader_with_backfills import Running, read_rows

SECOND = "second"
"""The standby, as its primary knows it."""
LAG = 2 * 2**20
AHEAD: LiteralString = "SELECT pg_logical_emit_message(false, 'cdc.test', repeat('x', 4000000))"


@pytest.fixture(name="pair")
def _pair(tmp_path: Path, postgres: EmbeddedPostgres) -> Iterator[tuple[EmbeddedPostgres, EmbeddedPostgres]]:
    """A primary with a table and its publication, and a standby made from its data directory."""
    assert postgres.version >= 16
    with EmbeddedPostgres(tmp_path / "primary", version=MAIN_VERSION, tcp=True) as primary:
        run_sql(primary.dsn(), "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'one')")
        run_sql(primary.dsn(), "CREATE PUBLICATION cdc_held_pub FOR TABLE t WITH (publish_via_partition_root = true)")
        primary.stop()
        backup = tmp_path / "backup"
        shutil.copytree(primary.data_directory, backup, symlinks=True)
        primary.start()
        follows = {
            "primary_conninfo": f"host=127.0.0.1 port={primary.port} user=postgres application_name={SECOND}",
            "hot_standby_feedback": "on",
        }
        with EmbeddedPostgres(tmp_path / "standby", version=MAIN_VERSION, settings=follows, tcp=True) as standby:
            standby.stop()
            (backup / "standby.signal").touch()
            restore(backup, standby.data_directory)
            standby.start()
            yield primary, standby


@needs_version(16)
def test_a_copy_rests_while_a_standby_lags_or_is_away_and_the_standby_can_be_captured_from(
    tmp_path: Path, pair: tuple[EmbeddedPostgres, EmbeddedPostgres]
) -> None:
    for folder in (tmp_path / "copied", tmp_path / "captured"):
        folder.mkdir()
    copy_rests_and_goes_on_by_itself(tmp_path / "copied", *pair)
    rows_come_through_the_standby(tmp_path / "captured", *pair)


def rows_come_through_the_standby(folder: Path, primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    held = Captured(folder, standby.dsn())
    assert find_problems(held.definition) == []
    held.write(slot="s_standby", more=f"  heartbeat: 300ms\n  primary: '{primary.dsn()}'\n")
    with ReaderProcess(held) as reader:
        until(lambda: folds_to(held, ("1", "one")), reader.output)
        run_sql(primary.dsn(), "INSERT INTO t VALUES (2, 'two')", "UPDATE t SET v = 'more' WHERE id = 1")
        until(lambda: folds_to(held, ("1", "more"), ("2", "two")), reader.output)
        assert rows_of(standby.dsn(), "SELECT pg_is_in_recovery()") == [(True,)]
        assert reader.child.poll() is None


def copy_rests_and_goes_on_by_itself(folder: Path, primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    held = Captured(folder, primary.dsn())
    with held.path.open("a") as definition:
        definition.write(f"snapshot: {{max_source_load: {{standby: {{name: {SECOND}, lag: {LAG}}}}}}}\n")
    held.copy()
    with connect(primary.dsn()) as conn, Running(held) as running:
        running.until(lambda: replay_lag(conn, SECOND) is not None, "the standby")
        run_sql(standby.dsn(), "SELECT pg_wal_replay_pause()")
        run_sql(primary.dsn(), AHEAD)
        running.until(lambda: (replay_lag(conn, SECOND) or 0) > LAG, "a standby that lags")
        job = running.ask(BackfillRequest(("public.t",)))
        assert f"standby {SECOND!r} lags by" in running.until(lambda: reason(running, job), "a rest")
        assert len(read_rows(held)) == 1
        run_sql(standby.dsn(), "SELECT pg_wal_replay_resume()")
        assert running.ended(job).state == "done"
        assert len(read_rows(held)) == 2
        standby.stop()
        running.until(lambda: replay_lag(conn, SECOND) is None, "the standby's end")
        job = running.ask(BackfillRequest(("public.t",)))
        assert running.until(lambda: reason(running, job), "a rest") == f"standby {SECOND!r} is not connected"
        assert len(read_rows(held)) == 2
        standby.start()
        assert running.ended(job).state == "done"
        assert len(read_rows(held)) == 3


def reason(running: Running, job: int) -> str | None:
    """Why the backfill rests, as the catalog shows it."""
    command = running.catalog.commands.get(job)
    return None if command is None or command.result is None else command.result["reason"]


def folds_to(held: Captured, *expected: tuple[str | None, ...]) -> bool:
    with suppress(LogError, StopIteration):
        return held.folded("t") == list(expected)
    return False
