"""A table that is skipped is taken for exact as it is: sinks take it up again, and nothing that they hold vanishes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from cdc import metrics
from cdc.capture.operator_recovery import skip_to_lsn
from cdc.catalog import Catalog
from cdc.catalog.commands import CommandState
from cdc.log.reader import LogReader
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest
from cdc.snapshot.reader_commands import SKIP_TABLES, request_skip
from cdc.table import TableState
from cdc.targets.lake_reader import Lake, read_target
from cdc.targets.published_record import TableRecord, TargetState
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.snapshot.reader_with_backfills import Running


def lose_changes(held: Captured) -> None:
    """What is in the WAL so far is passed over, and the table marked for it; no reader runs."""
    run_sql(held.dsn, "SELECT pg_logical_emit_message(true, 'cdc.test', 'somewhere to go')")
    end = Lsn.parse(rows_of(held.dsn, "SELECT pg_current_wal_flush_lsn()::text")[0][0])
    skip_to_lsn(held.definition, end, ["public.t"])


def applied(held: Captured, catalog: Catalog) -> tuple[TableRecord, list[dict[str, Any]]]:
    """Bring a Delta sink to the log's end as its driver does, and give where the table stands and what it holds."""
    place = f"{held.folder}/lake/{{schema}}/{{table}}"
    mended = True
    while mended:
        with closing(DeltaSink(DeltaSettings("lake", place))) as sink:
            fold = RangeFolder(LogReader(held.folder / "log"), "lake", ("*.*",))
            loop = SinkLoop(sink, fold, CutRequests(catalog, "lake"), SinkFigures("held", "lake", metrics.Metrics()))
            loop.open()
            for table in loop.lagging_tables:
                loop.catch_up(table, None)
            loop(None, held.log.durable or Position(0))
            mended = loop.needs_reopen
            loop.drain()
    published = Lake.open(place).published()
    assert published is not None
    (record,) = published.tables.values()
    return record, read_target(record.target, record.version).read_all().select(["id", "v"]).to_pylist()


def test_a_sink_that_had_stopped_goes_on_with_what_it_has(tmp_path: Path, database: str) -> None:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'one'), (2, 'two')")
    held = Captured(tmp_path, database)
    held.copy()
    with Catalog.open(held.definition.catalog.url) as catalog:
        assert applied(held, catalog)[0].state == TargetState.STREAMING
        run_sql(database, "INSERT INTO t VALUES (3, 'lost')")
        lose_changes(held)
        with Running(held) as running:
            run_sql(database, "UPDATE t SET v = 'marked' WHERE id = 1")
            running.caught_up()
        assert applied(held, catalog)[0].state == TargetState.FAILED
        with Running(held) as running:
            job, topics = request_skip(held.definition, catalog, ["public.*"], "test")
            assert running.ended(job).state is CommandState.DONE
            run_sql(database, "INSERT INTO t VALUES (4, 'four')", "DELETE FROM t WHERE id = 2")
            running.caught_up()
        assert (topics, [s.state for s in held.log.schemas().values()]) == (["public.t"], [TableState.LIVE])
        record, rows = applied(held, catalog)
        assert record.state == TargetState.STREAMING
        assert sorted((row["id"], row["v"]) for row in rows) == [(1, "marked"), (4, "four")]


def test_a_first_copy_that_was_given_up_is_skipped_and_one_on_its_way_is_not(tmp_path: Path, database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 500) i",
    )
    held = Captured(tmp_path, database)
    with held.path.open("a") as definition:
        definition.write("snapshot: {beside: 0, chunk_rows: 20, parallel: 1}\n")
    with Running(held) as running:
        # one that takes its time, so that the copy nobody asked for is not begun
        asked = running.ask(BackfillRequest(("public.t",), resync=True, rate=100, epoch=0))
        running.until(lambda: running.state(asked) == "snapshotting")
        refused = running.ended(running.catalog.commands.post("held", SKIP_TABLES, {"tables": ["public.t"]}))
        assert (refused.state, (refused.result or {})["error"]["code"]) == (CommandState.FAILED, "CDC-1006")
        running.catalog.commands.post("held", "backfill.cancel", {"id": asked})
        running.ended(asked)
        done = running.ended(running.catalog.commands.post("held", SKIP_TABLES, {"tables": ["public.t"]}))
        assert done.state is CommandState.DONE
        run_sql(database, "UPDATE t SET v = 'later' WHERE id = 500")
        running.caught_up()
        assert len(running.catalog.commands.ls("held", BACKFILL)) == 1
    (schema,) = held.log.schemas().values()
    assert schema.state is TableState.LIVE
    assert ("500", "later") in held.folded("t")
