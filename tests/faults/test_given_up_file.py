"""A data file of the log is damaged and there is no copy: it is given up, and the reader goes on exactly behind it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cdc.log import consumers
from cdc.log.audit.drop_file import DamagedFile, DroppedFile, RecoveryWay
from cdc.log.disk_format import LogFile
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.snapshot.backfill_documents import BackfillRequest
from cdc.table import TableState
from cdc.targets.lake_reader import read_target
from tests.cli.command import spawn
from tests.faults.capture import Captured
from tests.faults.test_drifted_table import sink_states, state
from tests.fixtures.forked import Forked
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until
from tests.snapshot.multiset import left_of
from tests.snapshot.reader_with_backfills import Running


def having(files: list[LogFile]) -> list[LogFile]:
    """Those with rows of tables."""
    return [file for file in files if file.relations is not None and not file.schemas_only]


def cut_short(files: list[LogFile]) -> str:
    """The last file with rows of tables, now without its end."""
    path = Path(max(having(files), key=lambda file: file.last).path)
    path.write_bytes(path.read_bytes()[:-40])
    return str(path)


def given_up(held: Captured) -> DroppedFile:
    """Its last file with rows of tables, which cannot be read any more."""
    return DamagedFile.find(held.definition.log.root, cut_short(held.log.every_file())).drop()


def test_a_table_without_a_key_whose_copy_is_lost_comes_back_whole_with_a_resync(tmp_path: Path, database: str) -> None:
    run_sql(
        database,
        "CREATE TABLE t (a int, v text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i % 5, 'x' FROM generate_series(1, 40) i",
    )
    held = Captured(tmp_path, database)
    held.copy()
    held.stream()  # behind a copy alone nothing else can stand
    done = given_up(held)
    assert (done.way, done.marked) == (RecoveryWay.GIVEN_UP, ("public.t",))
    run_sql(database, "INSERT INTO t VALUES (7, 'behind')")

    with Running(held) as running:
        assert running.ended(running.ask(BackfillRequest(done.marked, resync=True))).state == "done"
        running.caught_up()
    (schema,) = held.log.schemas().values()
    assert schema.state is TableState.LIVE
    behind = [row for row in held.rows() if row["position"] > done.last]
    told = [tuple(value for _, value in image) for image in left_of(behind)]
    assert sorted(told) == sorted(rows_of(database, "SELECT a::text, v FROM t"))


def test_the_reader_loses_nothing_behind_the_mark_and_a_later_version_keeps_it(tmp_path: Path, database: str) -> None:
    run_sql(database, "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)")
    held = Captured(tmp_path, database)
    held.copy()
    run_sql(database, "INSERT INTO t SELECT i, 'x' FROM generate_series(1, 9) i")
    held.stream()
    root = held.definition.log.root
    path = cut_short(held.log.every_file())
    run_sql(database, "INSERT INTO t VALUES (10, 'next')", "INSERT INTO u VALUES (1)")
    before = held.log.durable
    done = DamagedFile.find(root, path).drop()
    assert done.marked == ("public.t",)
    assert held.log.durable == (before or 0) + 1

    run_sql(database, "ALTER TABLE t ADD COLUMN w int", "INSERT INTO t VALUES (11, 'later', 1)")
    held.stream()
    rows = [(row["topic"], row["key"]) for row in held.rows() if row["op"] == "c"]
    assert rows == [("public.t", ["10"]), ("public.u", ["1"]), ("public.t", ["11"])]
    states = {schema.topic: schema.state for schema in held.log.schemas().values()}
    assert states == {"public.t": TableState.NEEDS_RESYNC, "public.u": TableState.LIVE}
    assert held.folded("u") == rows_of(database, "SELECT id::text FROM u")


@pytest.mark.slow
def test_a_sink_stands_at_it_while_the_reader_goes_on_and_drop_file_lets_the_other_tables_go_on(
    pipeline: Pipeline,
) -> None:
    filling(pipeline)
    reader, driver = pipeline.reader(), pipeline.apply()
    pipeline.wait(lambda: sink_states(pipeline) == {"streaming"}, "both tables in the lake")
    ended(driver)
    run_sql(pipeline.dsn, "INSERT INTO shop.t SELECT i, i FROM generate_series(1, 100) i")
    pipeline.wait(lambda: sum(file.rows for file in having(files(pipeline))) > 100, "the rows in the log")
    path = cut_short(files(pipeline))
    lost = next(file for file in files(pipeline) if file.path == path)

    driver = pipeline.apply()
    message, remedy = until(lambda: told(pipeline), pipeline.output)
    assert f"'{path}' cannot be read; affected: positions {lost.first} to {lost.last}" in message
    assert f"run 'cdc log drop-file FILE -c {pipeline.definition}'" in remedy
    stood = sink_position(pipeline)
    run_sql(pipeline.dsn, "INSERT INTO shop.u VALUES (2)")
    pipeline.settle()  # captured all the same
    assert stood == sink_position(pipeline) < lost.first < pipeline.durable()
    assert ids(pipeline, "u") == [1]

    ended(reader, driver)
    name = path.removeprefix(f"{pipeline.log}/")
    done = spawn("log", "drop-file", name, "--yes", "-c", pipeline.definition, environment=environment(pipeline))
    assert done.status == 0, done.errors
    pipeline.reader()
    pipeline.apply()
    pipeline.wait(lambda: ids(pipeline, "u") == [1, 2], "the other table to go on")
    pipeline.wait(lambda: sink_states(pipeline) == {"failed", "streaming"}, "the table to be told as stopped")
    assert state(pipeline.log) is TableState.NEEDS_RESYNC
    assert ids(pipeline, "t") == []


@pytest.mark.slow
def test_a_resync_behind_it_brings_log_and_lake_back(pipeline: Pipeline) -> None:
    filling(pipeline)
    reader = pipeline.reader()
    pipeline.wait_for_copy()
    run_sql(pipeline.dsn, "INSERT INTO shop.t SELECT i, i FROM generate_series(1, 100) i")
    pipeline.wait(lambda: sum(file.rows for file in having(files(pipeline))) > 100, "the rows in the log")
    reader.terminate()
    assert reader.wait(30) == 0
    path = cut_short(files(pipeline))
    found = spawn("log", "verify", "-c", pipeline.definition, environment=environment(pipeline))
    assert found.status == 4
    named = re.search(r"changes/segment=\d+/\w+\.parquet", found.output)
    assert named is not None
    assert path.endswith(named[0])
    done = spawn("log", "drop-file", named[0], "--yes", "-c", pipeline.definition, environment=environment(pipeline))
    assert done.status == 0, done.errors
    pipeline.reader()
    pipeline.apply()
    pipeline.wait(lambda: "failed" in sink_states(pipeline), "the sink's table to stop")
    asked = spawn("tables", "resync", "shop.t", "-c", pipeline.definition, environment=environment(pipeline))
    assert asked.status == 0, asked.errors
    pipeline.wait(lambda: state(pipeline.log) is TableState.LIVE, "the mark to go")
    pipeline.wait(lambda: sink_states(pipeline) == {"streaming"}, "the sink's table to come back")
    assert pipeline.verify()["ok"], pipeline.output()


def files(pipeline: Pipeline) -> list[LogFile]:
    """Of changes."""
    return LogReader(pipeline.log).every_file()


def filling(pipeline: Pipeline) -> None:
    """A definition of a lake with two tables, one of which has a row."""
    run_sql(pipeline.dsn, "CREATE SCHEMA shop", "CREATE TABLE shop.t (id int PRIMARY KEY, b int)")
    run_sql(pipeline.dsn, "CREATE TABLE shop.u (id int PRIMARY KEY)", "INSERT INTO shop.u VALUES (1)")
    pipeline.write(sinks=f"[{{name: lake, type: delta, path: '{pipeline.folder}/lake/{{schema}}/{{table}}'}}]")


def environment(pipeline: Pipeline) -> dict[str, str]:
    """Of its commands."""
    return {"CDC_TEST_DSN": pipeline.dsn}


def ended(*children: Forked) -> None:
    """Processes that were asked to end have."""
    for child in children:
        child.terminate()
        assert child.wait(60) == 0


def told(pipeline: Pipeline) -> tuple[str, str] | None:
    """What status says of the sink, and what to do."""
    done = spawn("status", "-c", pipeline.definition, "--json", environment=environment(pipeline))
    problems = json.loads(done.output)["result"]["problems"]
    return next(((p["message"], p["remedy"]) for p in problems if p["code"] == "CDC-4002"), None)


def sink_position(pipeline: Pipeline) -> Position:
    """Where the lake stands, by its own word beside the log."""
    (lake,) = consumers.list_consumers(pipeline.log)
    return lake.position


def ids(pipeline: Pipeline, table: str) -> list[int]:
    """Of the rows of a table of the lake."""
    rows = read_target(f"{pipeline.folder}/lake/shop/{table}").read_all().to_pylist()
    return sorted(row["id"] for row in rows)
