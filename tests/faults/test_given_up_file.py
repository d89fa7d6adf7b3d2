"""A data file of the log is damaged and there is no copy: it is given up, and the reader goes on exactly behind it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cdc.log.damaged import Damaged, Dropped, Way
from cdc.log.layout import LogFile
from cdc.log.read import LogReader
from cdc.snapshot.work import Request
from cdc.table import TableState
from tests.cli.command import spawn
from tests.faults.capture import Captured
from tests.faults.test_drifted_table import sink_states, state
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import rows_of, run_sql
from tests.snapshot.multiset import left_of
from tests.snapshot.running import Running


def having(files: list[LogFile]) -> list[LogFile]:
    """Those with rows of tables."""
    return [file for file in files if file.relations is not None and not file.schemas_only]


def cut_short(files: list[LogFile]) -> str:
    """The last file with rows of tables, now without its end."""
    path = Path(max(having(files), key=lambda file: file.last).path)
    path.write_bytes(path.read_bytes()[:-40])
    return str(path)


def given_up(held: Captured) -> Dropped:
    """Its last file with rows of tables, which cannot be read any more."""
    return Damaged.find(held.definition.log.root, cut_short(held.log.every_file())).drop()


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
    assert (done.way, done.marked) == (Way.GIVEN_UP, ("public.t",))
    run_sql(database, "INSERT INTO t VALUES (7, 'behind')")

    with Running(held) as running:
        assert running.ended(running.ask(Request(done.marked, resync=True))).state == "done"
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
    done = Damaged.find(root, path).drop()
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
def test_a_resync_behind_it_brings_log_and_lake_back(pipeline: Pipeline) -> None:
    run_sql(pipeline.dsn, "CREATE SCHEMA shop", "CREATE TABLE shop.t (id int PRIMARY KEY, b int)")
    run_sql(pipeline.dsn, "CREATE TABLE shop.u (id int PRIMARY KEY)", "INSERT INTO shop.u VALUES (1)")
    pipeline.write(sinks=f"[{{name: lake, type: delta, path: '{pipeline.folder}/lake/{{schema}}/{{table}}'}}]")
    reader = pipeline.reader()
    pipeline.wait_for_copy()
    run_sql(pipeline.dsn, "INSERT INTO shop.t SELECT i, i FROM generate_series(1, 100) i")
    pipeline.wait(lambda: sum(file.rows for file in having(files(pipeline))) > 100, "the rows in the log")
    reader.terminate()
    assert reader.wait(30) == 0
    environment = {"CDC_TEST_DSN": pipeline.dsn}
    path = cut_short(files(pipeline))
    found = spawn("log", "verify", "-c", pipeline.definition, environment=environment)
    assert found.status == 4
    named = re.search(r"changes/segment=\d+/\w+\.parquet", found.output)
    assert named is not None
    assert path.endswith(named[0])
    done = spawn("log", "drop-file", named[0], "--yes", "-c", pipeline.definition, environment=environment)
    assert done.status == 0, done.errors
    pipeline.reader()
    pipeline.apply()
    pipeline.wait(lambda: "failed" in sink_states(pipeline), "the sink's table to stop")
    asked = spawn("tables", "resync", "shop.t", "-c", pipeline.definition, environment=environment)
    assert asked.status == 0, asked.errors
    pipeline.wait(lambda: state(pipeline.log) is TableState.LIVE, "the mark to go")
    pipeline.wait(lambda: sink_states(pipeline) == {"streaming"}, "the sink's table to come back")
    assert pipeline.verify()["ok"], pipeline.output()


def files(pipeline: Pipeline) -> list[LogFile]:
    """Of changes."""
    return LogReader(pipeline.log).every_file()
