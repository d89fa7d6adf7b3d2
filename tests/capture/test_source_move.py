"""open_new_cluster: which definitions and servers a move refuses, and that a check leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.capture.operator_recovery import check_no_pending_epoch
from cdc.capture.source_move import open_new_cluster
from cdc.config import Definition
from cdc.errors import CdcError, LogFenced, PreflightFailed, SlotAtNewServer, SlotNotCreated, StateConflict
from cdc.log.epoch_and_slot_records import PendingEpoch, write_pending_epoch
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.faults.capture import Captured, capture_table
from tests.fixtures.postgres import fresh_database, rows_of, run_sql
from tests.fixtures.waiting import until

OURS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    return capture_table(tmp_path, database)


@pytest.fixture(name="new")
def _new(another_cluster: EmbeddedPostgres) -> Iterator[str]:
    """Another cluster with the table."""
    for dsn in fresh_database(another_cluster):
        run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY)")
        yield dsn


def moved(held: Captured, new: str) -> Definition:
    return held.definition.model_copy(update={"source": held.definition.source.moved_to(new)})


def refused(held: Captured, new: str, error: type[CdcError]) -> CdcError:
    """The move raises this error, and leaves the log and the new server as they are."""
    before, slots = held.log.durable, rows_of(new, OURS)
    with pytest.raises(error) as raised, open_new_cluster(moved(held, new), held.log, check=False):
        pass
    assert held.log.durable == before
    has_slots(new, slots)
    assert rows_of(new, "SELECT FROM pg_publication") == []
    return raised.value


def has_slots(dsn: str, slots: list[tuple[str]]) -> None:
    """The server has these slots as soon as it has ended the processes of closed connections."""
    until(lambda: rows_of(dsn, OURS) == slots, lambda: f"the slots {slots}, but {rows_of(dsn, OURS)}")


def test_a_check_makes_nothing_and_a_move_that_does_not_begin_the_epoch_keeps_no_slot(held: Captured, new: str) -> None:
    before = held.log.durable
    with open_new_cluster(moved(held, new), held.log, check=True) as cluster:
        assert [schema.topic for schema in cluster.tables.copied] == ["public.t"]
    assert rows_of(new, "SELECT FROM pg_publication") == []
    with open_new_cluster(moved(held, new), held.log, check=False):
        assert len(rows_of(new, OURS)) == 1
    assert held.log.durable == before
    has_slots(new, [])


def test_a_slot_of_the_same_name_is_somebody_elses(held: Captured, new: str) -> None:
    name = held.slot
    rows_of(new, f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")  # type: ignore[arg-type]
    error = refused(held, new, SlotAtNewServer)
    assert f"SELECT pg_drop_replication_slot('{name}');" in error.fix


def test_a_log_without_the_rows_of_its_tables_proves_nothing(held: Captured, new: str) -> None:
    held.path.write_text(held.path.read_text() + "snapshot: {mode: no_data}\n")
    refused(held, new, StateConflict)


def test_a_server_that_is_not_ready_for_capture_is_refused(held: Captured, new: str) -> None:
    run_sql(new, "CREATE TABLE unkeyed (v text)")
    refused(held, new, PreflightFailed)


def test_a_slot_that_the_definition_does_not_create_cannot_be_moved(held: Captured, new: str) -> None:
    name = held.slot
    held.path.write_text(held.path.read_text().replace(f"{{name: {name}}}", f"{{name: {name}, create: false}}"))
    refused(held, new, SlotNotCreated)


def test_a_log_that_moved_on_or_waits_for_an_epoch_is_not_moved(held: Captured, new: str) -> None:
    log = held.log
    run_sql(held.dsn, "INSERT INTO t VALUES (1)")
    held.stream()
    with pytest.raises(LogFenced), open_new_cluster(moved(held, new), log, check=False):
        pass
    last = held.log.last_commit
    assert last is not None
    write_pending_epoch(held.definition.log.root, PendingEpoch(last.last.epoch + 1, "because"))
    with pytest.raises(StateConflict, match="epoch 1 was requested"):
        check_no_pending_epoch(held.definition, last)
