"""A table that pgoutput no longer shows exactly is marked in the log, and status says so, after a restart too."""

from __future__ import annotations

import json

import pytest

from cdc.bucket_files import Root
from cdc.catalog import Catalog
from cdc.log.reader import LogReader
from cdc.table import TableState
from tests.cli.command import spawn
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import run_sql

REWRITE = "ALTER TABLE shop.t ALTER b TYPE int USING b * 2"


@pytest.mark.slow
def test_status_names_the_table_and_the_reason(pipeline: Pipeline) -> None:
    run_sql(pipeline.dsn, "CREATE SCHEMA shop", "CREATE TABLE shop.t (id int PRIMARY KEY, b int)")
    run_sql(pipeline.dsn, "INSERT INTO shop.t VALUES (1, 1)")
    pipeline.write()
    reader = pipeline.reader()
    pipeline.wait_for_copy()
    reader.terminate()
    assert reader.wait(30) == 0
    run_sql(pipeline.dsn, REWRITE)  # nobody looks, no row is sent
    pipeline.reader()
    pipeline.wait(lambda: state(pipeline.log) is TableState.NEEDS_RESYNC, "the mark")
    pipeline.wait(lambda: "column 'b' was altered" in reason(pipeline), "the reason in status")


@pytest.mark.slow
def test_a_resync_mends_table_and_targets_while_both_run(pipeline: Pipeline) -> None:
    run_sql(pipeline.dsn, "CREATE SCHEMA shop", "CREATE TABLE shop.t (id int PRIMARY KEY, b int)")
    run_sql(pipeline.dsn, "CREATE TABLE shop.u (id int PRIMARY KEY)", "INSERT INTO shop.u VALUES (1)")
    run_sql(pipeline.dsn, "INSERT INTO shop.t SELECT i, i FROM generate_series(1, 100) i")
    pipeline.write(sinks=f"[{{name: lake, type: delta, path: '{pipeline.folder}/lake/{{schema}}/{{table}}'}}]")
    pipeline.reader()
    pipeline.apply()
    pipeline.wait((pipeline.folder / "lake/shop/t/_delta_log").exists, "the lake")
    run_sql(pipeline.dsn, REWRITE, "INSERT INTO shop.t VALUES (101, 5)")
    pipeline.wait(lambda: state(pipeline.log) is TableState.NEEDS_RESYNC, "the mark")
    pipeline.wait(lambda: "failed" in sink_states(pipeline), "the sink's table to stop")
    asked = spawn("tables", "resync", "shop.t", "-c", pipeline.definition, environment={"CDC_TEST_DSN": pipeline.dsn})
    assert asked.status == 0, asked.errors
    pipeline.wait(lambda: state(pipeline.log) is TableState.LIVE, "the mark to go")
    pipeline.wait(lambda: sink_states(pipeline) == {"streaming"}, "the sink's table to come back")
    assert pipeline.verify()["ok"], pipeline.output()


def sink_states(pipeline: Pipeline) -> set[str]:
    with Catalog.open(f"sqlite:///{pipeline.folder}/catalog.db") as catalog:
        return {table.state for table in catalog.tables.ls(pipeline.name) if table.sink == "lake"}


def state(log: Root) -> TableState:
    return next(schema.state for schema in LogReader(log).schemas().values() if schema.name == "t")


def reason(pipeline: Pipeline) -> str:
    done = spawn("status", "-c", pipeline.definition, "--json", environment={"CDC_TEST_DSN": pipeline.dsn})
    problems = json.loads(done.output)["result"]["problems"]
    return str(next((p["message"] for p in problems if p["subject"] == "table shop.t"), ""))
