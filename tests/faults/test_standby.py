"""Capture from a standby: the slot is there, heartbeats go to the primary, and nothing is written to the standby."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cdc.checks import problems
from cdc.errors import LogError
from cdc.postgres.embedded import EmbeddedPostgres
from tests.faults.capture import Captured, ReaderProcess
from tests.faults.test_new_epoch import restore
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until


@pytest.fixture(name="pair")
def _pair(tmp_path: Path, postgres: EmbeddedPostgres) -> Iterator[tuple[EmbeddedPostgres, EmbeddedPostgres]]:
    """A primary with a table and its publication, and a standby made from its data directory."""
    assert postgres.version >= 16
    with EmbeddedPostgres(tmp_path / "primary") as primary:
        run_sql(primary.dsn(), "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'one')")
        run_sql(primary.dsn(), "CREATE PUBLICATION cdc_held_pub FOR TABLE t WITH (publish_via_partition_root = true)")
        primary.stop()
        backup = tmp_path / "backup"
        shutil.copytree(primary.data_directory, backup, symlinks=True)
        primary.start()
        follows = {
            "primary_conninfo": f"host=127.0.0.1 port={primary.port} user=postgres",
            "hot_standby_feedback": "on",
        }
        with EmbeddedPostgres(tmp_path / "standby", settings=follows) as standby:
            standby.stop()
            (backup / "standby.signal").touch()
            restore(backup, standby.data_directory)
            standby.start()
            yield primary, standby


def test_rows_of_the_primary_come_through_the_standby(
    tmp_path: Path, pair: tuple[EmbeddedPostgres, EmbeddedPostgres]
) -> None:
    primary, standby = pair
    held = Captured(tmp_path, standby.dsn())
    assert problems(held.definition) == []
    held.write(slot="s_standby", more=f"  heartbeat: 300ms\n  primary: '{primary.dsn()}'\n")
    with ReaderProcess(held) as reader:
        until(lambda: folds_to(held, ("1", "one")), reader.output)
        run_sql(primary.dsn(), "INSERT INTO t VALUES (2, 'two')", "UPDATE t SET v = 'more' WHERE id = 1")
        until(lambda: folds_to(held, ("1", "more"), ("2", "two")), reader.output)
        assert rows_of(standby.dsn(), "SELECT pg_is_in_recovery()") == [(True,)]
        assert reader.child.poll() is None


def folds_to(held: Captured, *expected: tuple[str | None, ...]) -> bool:
    with suppress(LogError, StopIteration):
        return held.folded("t") == list(expected)
    return False
