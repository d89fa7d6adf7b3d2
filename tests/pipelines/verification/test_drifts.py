"""Continuous verification finds every kind of drift in one pass; neither DDL nor a table's fault has to wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.catalog import Catalog
from cdc.catalog.verification_state import VerificationRecord, VerificationState
from cdc.config import load_definition
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.service.verification_runner import RunnerTiming, VerificationRunner
from pipelines.verification.continuous import ContinuousVerification, RangeResult, VerificationSchedule
from pipelines.verification.verify import VerifyOptions
from tests.catalog.test_verified_ranges import range_of
from tests.faults.capture import Captured
from tests.fixtures.postgres import fresh_database, rows_of, run_sql
from tests.fixtures.waiting import until
from tests.pipelines.apply_thread import ApplyThread, capture_with_sinks, spoil_index
from tests.snapshot.reader_with_backfills import Running

NAME = "held"


@dataclass
class Streaming:
    """A pipeline whose reader and apply process run in threads of the test."""

    captured: Captured
    applying: ApplyThread
    catalog: Catalog

    def lake(self, table: str) -> DeltaTable:
        return DeltaTable(str(self.captured.folder / "lake" / "public" / table))

    def verification(
        self, *tables: str, report: Callable[[RangeResult], None] = lambda _: None
    ) -> ContinuousVerification:
        options = VerifyOptions(tables=tables, timeout=30.0)
        schedule = VerificationSchedule(every=0.001, range_rows=20, one_sink_per_cut=True)
        return ContinuousVerification(self.captured.definition, options, schedule, report)

    def mismatched(self) -> dict[tuple[str, str], int]:
        """Rows that differed, by sink and table."""
        return {(one.sink, one.topic.partition(".")[2]): one.mismatched for one in self.catalog.verified.ls(NAME)}


def remove_a_row(table: DeltaTable) -> None:
    table.delete("id = 7")


def invent_a_row(table: DeltaTable) -> None:
    _append(table, 10, id=999)


def change_a_value(table: DeltaTable) -> None:
    table.update(updates={"v": "'bad'"}, predicate="id = 7")


def lose_a_value(table: DeltaTable) -> None:
    table.update(updates={"v": "NULL"}, predicate="id = 7")


def make_null_a_value(table: DeltaTable) -> None:
    table.update(updates={"n": "0"}, predicate="id = 11")


def bring_an_old_value_back(table: DeltaTable) -> None:
    table.update(updates={"v": "'v2'"}, predicate="id = 2")


def bring_a_deleted_row_back(table: DeltaTable) -> None:
    _append(table, 10, id=3)


def move_a_key_back(table: DeltaTable) -> None:
    table.update(updates={"id": "5"}, predicate="id = 500")


def empty_the_table(table: DeltaTable) -> None:
    table.delete()


def double_a_row(table: DeltaTable) -> None:
    _append(table, 10, id=10)


def exchange_values(table: DeltaTable) -> None:
    table.update(updates={"v": "CASE WHEN id = 7 THEN 'v8' ELSE 'v7' END"}, predicate="id IN (7, 8)")


def restore_an_older_version(table: DeltaTable) -> None:
    table.restore(table.version() - 1)


LAKE_DRIFTS = (
    remove_a_row,
    invent_a_row,
    change_a_value,
    lose_a_value,
    make_null_a_value,
    bring_an_old_value_back,
    bring_a_deleted_row_back,
    move_a_key_back,
    empty_the_table,
    double_a_row,
    exchange_values,
    restore_an_older_version,
)
"""Each happens to a table of its own, with the name of the function."""
INDEX_DRIFTS = {("20", "5.00"): None, ("21", "5.25"): "bad", ("9999", "1.00"): "bad"}
"""A document removed, one changed, one of a row that never was."""
TABLES = (*(drift.__name__ for drift in LAKE_DRIFTS), "same", "waited_for", "misfit", "beside", "unwatched")


def _append(table: DeltaTable, like: int, **values: int) -> None:
    row = pa.table(table.scan(predicate=f"id = {like}"))
    for name, value in values.items():
        place = row.schema.get_field_index(name)
        row = row.set_column(place, row.schema.field(place), pa.array([value], row.schema.field(place).type))
    write_deltalake(table, row, mode="append")


@pytest.fixture(name="streaming", scope="module")
def _streaming(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streaming]:
    """Tables with changed, deleted and moved rows, all of which the sinks have."""
    for dsn in fresh_database(postgres):
        fill(dsn)
        captured = capture_with_sinks(tmp_path_factory.mktemp("drifts"), dsn)
        url = captured.definition.catalog.url
        with Running(captured), ApplyThread(captured) as applying, Catalog.open(url) as catalog:
            streaming = Streaming(captured, applying, catalog)
            change(streaming)
            yield streaming


def fill(dsn: str) -> None:
    with connect(dsn) as conn:
        for name in TABLES:
            conn.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v text, n int)".encode())
            conn.execute(f"INSERT INTO {name} SELECT i, 'v' || i, nullif(i, 11) FROM generate_series(1, 50) i".encode())
    run_sql(
        dsn,
        "CREATE TABLE t (id int, part numeric(6,2), born timestamptz, v text, PRIMARY KEY (id, part))",
        "INSERT INTO t SELECT i, i / 4.0, now(), 'v' || i FROM generate_series(1, 50) i",
    )


def change(streaming: Streaming) -> None:
    """Change, delete and move a row of each table after the copy."""
    folder = streaming.captured.folder
    until(lambda: all(_has_table(folder, name) for name in TABLES), "every table in the lake")
    with connect(streaming.captured.dsn) as conn:
        for name in TABLES:
            conn.execute(f"UPDATE {name} SET v = 'new' WHERE id = 2".encode())
            conn.execute(f"DELETE FROM {name} WHERE id = 3".encode())
            conn.execute(f"UPDATE {name} SET id = 500 WHERE id = 5".encode())
    until(lambda: all(_is_changed(streaming.lake(name)) for name in TABLES), "the changes in the lake")


def _has_table(folder: Path, name: str) -> bool:
    return DeltaTable.is_deltatable(str(folder / "lake" / "public" / name))


def _is_changed(table: DeltaTable) -> bool:
    return bool(pc.is_in(pa.scalar(500), pa.table(table.scan(columns=["id"]))["id"].combine_chunks()).as_py())


def test_each_drift_is_found_within_one_pass(streaming: Streaming) -> None:
    drifting = [drift.__name__ for drift in LAKE_DRIFTS]
    verification = streaming.verification(*drifting, "same", "t")
    verification.round(streaming.catalog)
    assert not verification.wrong
    with streaming.applying.resting():
        for drift in LAKE_DRIFTS:
            drift(streaming.lake(drift.__name__))
        spoil_index(streaming.captured, INDEX_DRIFTS)
    streaming.verification(*drifting, "same", "t").round(streaming.catalog)
    found = streaming.mismatched()
    assert {name for name in (*drifting, "same") if found["lake", name]} == set(drifting)
    assert found["find", "t"] == len(INDEX_DRIFTS)
    assert (found["lake", "same"], found["lake", "t"]) == (0, 0)


def test_a_cut_ends_when_another_session_waits_for_its_lock(streaming: Streaming) -> None:
    dsn = streaming.captured.dsn
    results: list[RangeResult] = []
    sessions: list[Thread] = []

    def change_definition() -> None:
        with connect(dsn, autocommit=False) as conn:
            conn.execute("LOCK TABLE waited_for IN ACCESS EXCLUSIVE MODE")

    def wait_for_lock(result: RangeResult) -> None:
        results.append(result)
        if not sessions:
            sessions.append(Thread(target=change_definition))
            sessions[0].start()
            until(lambda: rows_of(dsn, "SELECT 1 FROM pg_locks WHERE NOT granted"), "a session that waits")

    streaming.verification("waited_for", report=wait_for_lock).round(streaming.catalog)
    sessions[0].join()
    positions = [result.found.position for result in results if result.found is not None]
    assert positions[0] < positions[1] == positions[2]
    assert all(result.verdict is not None and result.verdict.equal for result in results)


def test_a_table_that_cannot_be_compared_does_not_stop_the_others(streaming: Streaming) -> None:
    """A bound of its last pass does not fit its key any more."""
    unended = range_of(topic="public.misfit", began=datetime.now(UTC), ended="no number")
    streaming.catalog.verified.record(NAME, unended)
    results: list[RangeResult] = []
    verification = streaming.verification("misfit", "beside", report=results.append)
    verification.round(streaming.catalog)
    (refused,) = [result.verdict for result in results if result.found is None]
    assert refused is not None
    assert (refused.topic, refused.compared) == ("public.misfit", False)
    assert "invalid input syntax" in (refused.reason or "")
    assert streaming.mismatched()["lake", "beside"] == 0
    again = streaming.verification("misfit")
    again.round(streaming.catalog)
    (misfit,) = [one for one in streaming.catalog.verified.ls(NAME) if one.topic == "public.misfit"]
    assert (misfit.ended, misfit.mismatched, misfit.rows) == (True, 0, 49)


def test_the_server_process_verifies_by_itself_and_records_when_the_next_pass_is_due(streaming: Streaming) -> None:
    """A process that the runner starts compares what is due; nobody gave a command."""
    path = streaming.captured.path
    path.write_text(f"{path.read_text()}verify: {{every: 1h, max_cpu: 1.0}}\n")
    with streaming.applying.resting():
        streaming.lake("unwatched").delete("id = 7")
    timing = RunnerTiming(settle=0.0, poll=0.05)
    runner = VerificationRunner(streaming.catalog, load_definition(path), path, lambda: None, timing)
    runner.start()
    try:
        until(lambda: streaming.mismatched().get(("lake", "unwatched")), "the mismatch")
        record = until(lambda: _waiting(streaming.catalog), "the end of the pass")
    finally:
        runner.stop()
    assert record.next_at is not None
    minutes_left = (datetime.fromisoformat(record.next_at) - datetime.now(UTC)).total_seconds() / 60
    assert 0 < minutes_left <= 60


def _waiting(catalog: Catalog) -> VerificationRecord | None:
    record = catalog.verification.get(NAME)
    return record if record is not None and record.state is VerificationState.WAITING else None
