"""cdc source move: to a logical replica and a promoted standby; what is refused, and what a check leaves as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc.errors import MovedRowsDiffer
from cdc.postgres.embedded_server import EmbeddedPostgres
from pipelines.__main__ import main
from tests.fixtures.moving_source import MovingSource, replicated
from tests.fixtures.postgres import fresh_database, rows_of, run_sql


@pytest.fixture(name="former")
def _former(another_cluster: EmbeddedPostgres) -> Iterator[str]:
    """A database on another cluster than that of `database`."""
    yield from fresh_database(another_cluster)


@pytest.fixture(name="held")
def _held(tmp_path: Path, former: str, database: str) -> MovingSource:
    """A captured database and its logical replica `database`, which has every row."""
    held = MovingSource(tmp_path, former)
    held.begin()
    with replicated(former, database):
        run_sql(former, "INSERT INTO t VALUES (4000, 'not in the log yet', 2, now())")
    return held


def move(capsys: pytest.CaptureFixture[str], held: MovingSource, to: str, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the envelope."""
    capsys.readouterr()
    status = main(["move", "--to", to, *options, "--json", "-c", str(held.path)])
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return status, found


def test_the_log_continues_on_a_logical_replica_without_a_copy(
    held: MovingSource, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, copies = held.last.last, held.copies()
    status, found = move(capsys, held, database, "--check")
    assert (status, found["error"]["code"]) == (4, MovedRowsDiffer.code)  # a check does not read the rest
    assert "public.t: 1 rows are only on the new server" in found["error"]["message"]
    assert held.last.last == before
    assert rows_of(database, "SELECT FROM pg_replication_slots WHERE database = current_database()") == []
    assert rows_of(database, "SELECT FROM pg_publication") == []

    status, found = move(capsys, held, database)
    assert status == 0, found
    assert [table["topic"] for table in found["result"]["tables"] if table["equal"]] == [
        "public.bag", "public.quiet", "public.t",
    ]  # fmt: skip
    assert [step["kind"] for step in found["result"]["steps"]][-3:] == ["proved", "done", "next"]
    assert held.last.last.epoch == before.epoch + 1
    held.point_at(database)
    assert move(capsys, held, database)[0] == 0  # to run it again changes nothing
    held.continues(capsys)
    assert held.copies() == copies


@pytest.mark.slow
def test_tables_that_differ_are_named_and_only_they_are_copied(
    held: MovingSource, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sql(database, "UPDATE t SET v = 'other' WHERE id = 11", "CREATE TABLE added (id int PRIMARY KEY)")
    before, copies = held.last.last.epoch, held.copies()
    status, found = move(capsys, held, database)
    assert (status, found["error"]["code"]) == (4, MovedRowsDiffer.code)
    assert (
        "1 of 4 tables of the new server differ from the log: public.t: 0 rows are only on the new server, 0 only "
        in found["error"]["message"]
    )
    assert held.last.last.epoch == before

    status, found = move(capsys, held, database, "--resync")
    assert status == 0, found
    held.point_at(database)
    assert {schema.name: schema.state.value for schema in held.log.schemas().values()} == {
        "added": "snapshotting", "bag": "live", "quiet": "live", "t": "snapshotting",
    }  # fmt: skip
    assert held.copies() == copies


def test_a_server_that_is_already_the_source_is_proved_and_left_alone(
    tmp_path: Path, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = MovingSource(tmp_path, database)
    held.begin()
    before = held.last
    status, found = move(capsys, held, database)
    assert status == 0, found
    assert "has every transaction of the log" in found["result"]["steps"][-2]["text"]
    assert held.last == before
