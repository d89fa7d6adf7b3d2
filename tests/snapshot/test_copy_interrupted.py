"""First copies that are stopped, paused, cancelled or asked for anew at awkward moments: nothing is lost or left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, LiteralString

import pytest

from cdc.capture.operator_recovery import begin_epoch
from cdc.catalog import Catalog
from cdc.log_row import Operation
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction, BackfillRequest
from cdc.snapshot.reader_commands import CHECK_TABLES
from cdc.table import TableState
from tests.faults.capture import Captured
from tests.faults.test_given_up_file import given_up
from tests.fixtures.postgres import drop_when_free, rows_of, run_sql
from tests.snapshot.reader_with_backfills import Running

CHUNKED = "snapshot: {beside: 0, chunk_rows: 10, parallel: 2%s}\n"
SLOWLY = ", max_source_load: {bytes_per_second: 75000}"
LOCKED: LiteralString = "LOCK TABLE t IN ACCESS EXCLUSIVE MODE"
WAITS: LiteralString = """
    SELECT query FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'cdc backfill'
"""
ALL_OF_T: LiteralString = "SELECT id::text, v, long FROM t"


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text, long text)",
        "ALTER TABLE t ALTER long SET STORAGE EXTERNAL",
        "CREATE TABLE u (id int PRIMARY KEY, v text, long text)",
        "INSERT INTO t SELECT i, repeat('v', 600), repeat('x', 3000) FROM generate_series(1, 100) i",
        "INSERT INTO u SELECT i, repeat('v', 600), repeat('x', 10) FROM generate_series(1, 100) i",
    )
    return copied_in_chunks(tmp_path, database, SLOWLY)


def copied_in_chunks(folder: Path, dsn: str, more: str = "") -> Captured:
    held = Captured(folder, dsn)
    text = held.path.read_text().partition("snapshot:")[0]
    held.path.write_text(text + CHUNKED % more)
    return held


def in_full_speed(held: Captured) -> None:
    copied_in_chunks(held.folder, held.dsn)


def is_exact(held: Captured, table: str = "t") -> bool:
    """Whether the log tells the rows of the source, and that all of them are there."""
    query: LiteralString = ALL_OF_T if table == "t" else "SELECT id::text, v, long FROM u"
    (state,) = {s.state for s in held.log.schemas().values() if s.name == table}
    return state is TableState.LIVE and held.folded(table) == sorted(tuple(row) for row in rows_of(held.dsn, query))


def eventually(running: Running, holds: Callable[[], bool]) -> None:
    """Wait until it holds, and let the stream move meanwhile: what a look at the catalogue finds goes along with it."""

    def moved() -> bool:
        running.caught_up()
        return holds()

    running.until(moved)


def copies(running: Running) -> list[Any]:
    return running.catalog.commands.ls("held", BACKFILL)


def halfway(running: Running) -> int:
    """The first copy's job once it has placed rows."""
    return int(running.until(lambda: next((c.id for c in copies(running) if rows_of_job(c.result)), None)))


def rows_of_job(result: dict[str, Any] | None) -> int:
    return sum(table["rows"] for table in (result or {}).get("tables", {}).values())


def generations(held: Captured, table: str = "t") -> int:
    log = held.log
    rows = [r for batch in log.rows(Position(0), log.durable or Position(0)) for r in batch.to_pylist()]
    return sum(r["op"] == Operation.GENERATION.value and r["topic"] == f"public.{table}" for r in rows)


@contextmanager
def before_the_bases(folder: Path, dsn: str, *changes: LiteralString) -> Iterator[Captured]:
    """Two rows that the chunks passed by, and the changes committed while their bases wait to be read."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, v text, long text)",
        "ALTER TABLE t ALTER long SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, repeat('v', 1900), repeat('x', 3000) FROM generate_series(1, 4) i",
    )
    held = copied_in_chunks(folder, dsn)
    began = held.copy()
    run_sql(dsn, "UPDATE t SET v = repeat('w', 1900) WHERE id IN (1, 3)", "DELETE FROM t WHERE id IN (2, 4)")
    held.stream()  # a block counts as read only once the log has all that its reader saw
    oid, file = rows_of(dsn, "SELECT 't'::regclass::oid::int, pg_relation_filenode('t')::int")[0]
    assert rows_of(dsn, "SELECT ctid::text FROM t") == [("(1,1)",), ("(1,2)",)]
    read = {"oid": oid, "file": file, "next": 1, "end": 1}
    work = {"state": "snapshotting", "began": int(began), "blocks": [read], "size": 1, "rows": 0}
    with Catalog.open(held.definition.catalog.url) as catalog:
        job = catalog.commands.post("held", BACKFILL, BackfillRequest(("public.t",), resync=True, epoch=0).to_json())
        catalog.commands.record(job, {"state": "paused", "tables": {"public.t": work}})
    with connect(dsn, autocommit=False) as first, Running(held) as running:
        try:
            running.caught_up()  # a reader that begins has to look at the table, too
            first.execute(LOCKED)
            running.catalog.commands.post("held", BackfillAction.RESUME.kind, {"id": job})
            running.until(lambda: rows_of(dsn, WAITS))  # for the table's size, before it asks what lacks a base
            for change in changes:
                first.execute(change)
            first.commit()
        finally:  # else who waits for the lock would never end
            first.rollback()
        assert running.ended(job).state == "done", copies(running)[0].result
        running.caught_up()
        yield held


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(("UPDATE t SET v = 'last' WHERE id = 1",), marks=pytest.mark.slow),
        pytest.param(("UPDATE t SET id = 2 WHERE id = 1",), marks=pytest.mark.slow),
        (  # one moves and comes back, of the other another row takes the place
            "UPDATE t SET id = id + 10",
            "UPDATE t SET id = 1 WHERE id = 11",
            "INSERT INTO t VALUES (3, 'other', 'short')",
        ),
        pytest.param(("DELETE FROM t",), marks=pytest.mark.slow),
        pytest.param(("DELETE FROM t", "INSERT INTO t VALUES (1, 'again', 'short')"), marks=pytest.mark.slow),
        pytest.param(("TRUNCATE t",), marks=pytest.mark.slow),
    ],
)
def test_a_row_that_moves_while_its_base_is_read_keeps_its_unsent_value(
    tmp_path: Path, database: str, changes: tuple[LiteralString, ...]
) -> None:
    with before_the_bases(tmp_path, database, *changes) as held:
        assert is_exact(held)


@pytest.mark.slow
def test_a_reader_that_ends_between_the_end_of_a_copy_and_its_note_goes_on_with_the_next_table(held: Captured) -> None:
    in_full_speed(held)
    with Running(held) as running:
        job = running.until(lambda: copies(running))[0].id
        running.ended(job)
        request = copies(running)[0].payload
    # what the catalog held a moment before the end of the first table was noted
    with Catalog.open(held.definition.catalog.url) as catalog:
        ended = catalog.commands.get(job)
        assert ended is not None
        assert ended.result is not None
        tables = ended.result["tables"]
        tables["public.t"]["state"] = "snapshotting"
        tables["public.u"] = {"state": "queued"}
        again = catalog.commands.post("held", BACKFILL, request)
        catalog.commands.record(again, {"state": "snapshotting", "tables": tables})
    with Running(held) as running:
        assert running.ended(again).state == "done", copies(running)[0].result
        running.caught_up()
    assert is_exact(held)
    assert is_exact(held, "u")
    assert generations(held, "t") == 1


def test_a_table_that_is_dropped_while_it_is_copied_stops_no_other(held: Captured) -> None:
    with Running(held) as running:
        job = halfway(running)
        run_sql(held.dsn, "DROP TABLE t")
        running.ended(job)
    in_full_speed(held)
    with Running(held) as running:
        eventually(running, lambda: is_exact(held, "u"))


@pytest.mark.slow
def test_a_table_that_no_rule_matches_any_more_stops_no_other(held: Captured) -> None:
    with Running(held) as running:
        halfway(running)
    text = held.path.read_text().replace("match: 'public.*'", "match: 'public.u'")
    held.path.write_text(text)
    in_full_speed(held)
    with Running(held) as running:
        running.catalog.commands.post("held", CHECK_TABLES, {})
        eventually(running, lambda: is_exact(held, "u"))


@pytest.mark.slow
def test_a_new_epoch_in_the_middle_of_a_copy_begins_it_anew(held: Captured) -> None:
    with Running(held) as running:
        halfway(running)
    in_full_speed(held)
    with connect(held.dsn) as conn:
        drop_when_free(conn, held.slot)
    # nobody watches
    run_sql(held.dsn, "DELETE FROM t WHERE id % 2 = 0", "UPDATE t SET v = 'unseen' WHERE id % 3 = 0", "DELETE FROM u")
    begin_epoch(held.definition)
    with Running(held) as running:
        eventually(running, lambda: is_exact(held) and is_exact(held, "u"))


@pytest.mark.slow
def test_a_copy_of_which_rows_were_lost_with_a_file_of_the_log_begins_anew(held: Captured) -> None:
    with Running(held) as running:
        job = halfway(running)
    in_full_speed(held)
    run_sql(held.dsn, "DELETE FROM t WHERE id % 2 = 0")
    assert given_up(held).marked == ("public.t",)
    with Running(held) as running:
        assert running.ended(job).state == "done", running.ended(job).result
        running.caught_up()
    assert is_exact(held)
    assert is_exact(held, "u")


@pytest.mark.slow
def test_a_catalog_that_is_lost_in_the_middle_of_a_copy_is_no_loss(held: Captured) -> None:
    with Running(held) as running:
        halfway(running)
    in_full_speed(held)
    for file in held.folder.glob("catalog.db*"):
        file.unlink()
    run_sql(held.dsn, "DELETE FROM t WHERE id % 2 = 0", "UPDATE t SET v = 'new' WHERE id % 3 = 0")
    with Running(held) as running:
        eventually(running, lambda: is_exact(held) and is_exact(held, "u"))
    assert generations(held) == generations(held, "u") == 1


@pytest.mark.slow
def test_a_paused_copy_stays_so_when_the_reader_starts_anew(held: Captured) -> None:
    with Running(held) as running:
        job = halfway(running)
        running.catalog.commands.post("held", BackfillAction.PAUSE.kind, {"id": job})
        running.until(lambda: running.state(job) == "paused")
    in_full_speed(held)
    with Running(held) as running:
        for _ in range(2):  # the second is looked at after the copy had its turn
            running.ended(running.catalog.commands.post("held", CHECK_TABLES, {}))
        found = running.catalog.commands.get(job)
        assert found is not None
        assert (found.state, (found.result or {})["state"]) == ("pending", "paused")
        running.catalog.commands.post("held", BackfillAction.RESUME.kind, {"id": job})
        assert running.ended(job).state == "done"
        running.caught_up()
    assert is_exact(held)


@pytest.mark.parametrize("moment", ["queued", *(pytest.param(m, marks=pytest.mark.slow) for m in ("middle", "paused"))])
def test_a_cancelled_copy_says_so_and_a_resync_makes_it_whole(held: Captured, moment: str) -> None:
    if moment == "queued":
        with Catalog.open(held.definition.catalog.url) as catalog:
            job = catalog.commands.post(
                "held", BACKFILL, BackfillRequest(("public.*",), resync=True, epoch=0).to_json()
            )
            catalog.commands.post("held", BackfillAction.CANCEL.kind, {"id": job})
    with Running(held) as running:
        if moment != "queued":
            job = halfway(running)
        if moment == "paused":
            running.catalog.commands.post("held", BackfillAction.PAUSE.kind, {"id": job})
            running.until(lambda: running.state(job) == "paused")
        if moment != "queued":
            running.catalog.commands.post("held", BackfillAction.CANCEL.kind, {"id": job})
        ended = running.ended(job)
        assert (ended.state, (ended.result or {})["state"]) == ("failed", "cancelled")
    run_sql(held.dsn, "DELETE FROM t WHERE id % 2 = 0", "UPDATE t SET v = 'new' WHERE id % 3 = 0")
    in_full_speed(held)
    with Running(held) as running:
        running.ended(running.catalog.commands.post("held", CHECK_TABLES, {}))
        assert {s.state for s in held.log.schemas().values()} == {TableState.SNAPSHOTTING}
        assert len(copies(running)) == 1
        assert running.ended(running.ask(BackfillRequest(("public.*",), resync=True))).state == "done"
        running.caught_up()
    assert is_exact(held)
    assert is_exact(held, "u")


@pytest.mark.slow
def test_a_resync_beside_a_paused_copy_of_the_same_table_leaves_both_ended(held: Captured) -> None:
    with Catalog.open(held.definition.catalog.url) as catalog:
        job = catalog.commands.post("held", BACKFILL, BackfillRequest(("public.*",), resync=True, epoch=0).to_json())
        catalog.commands.post("held", BackfillAction.PAUSE.kind, {"id": job})
    in_full_speed(held)
    with Running(held) as running:
        assert running.ended(running.ask(BackfillRequest(("public.*",), resync=True))).state == "done"
        assert running.state(job) == "paused"
        writer = Thread(target=run_sql, args=(held.dsn, "UPDATE t SET v = 'new', id = id + 1000"))
        writer.start()
        running.catalog.commands.post("held", BackfillAction.RESUME.kind, {"id": job})
        assert running.ended(job).state == "done", running.ended(job).result
        writer.join()
        running.caught_up()
    assert is_exact(held)
