"""A table that pgoutput no longer shows exactly is marked in the log, and status says so, after a restart too."""

from __future__ import annotations

import json
from pathlib import Path

from cdc.log.read import LogReader
from cdc.table import TableState
from tests.cli.command import spawn
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import run_sql

REWRITE = "ALTER TABLE shop.t ALTER b TYPE int USING b * 2"


def test_status_names_the_table_and_the_reason(pipeline: Pipeline) -> None:
    run_sql(pipeline.dsn, "CREATE SCHEMA shop", "CREATE TABLE shop.t (id int PRIMARY KEY, b int)")
    run_sql(pipeline.dsn, "INSERT INTO shop.t VALUES (1, 1)")
    pipeline.write()
    reader = pipeline.reader()
    pipeline.wait(lambda: pipeline.durable() > 0, "the copy")
    reader.terminate()
    assert reader.wait(30) == 0
    run_sql(pipeline.dsn, REWRITE)  # nobody looks, no row is sent
    pipeline.reader()
    pipeline.wait(lambda: state(pipeline.log) is TableState.NEEDS_RESYNC, "the mark")
    pipeline.wait(lambda: "'b' altered" in reason(pipeline), "the reason in status")


def state(log: Path) -> TableState:
    return next(iter(LogReader(log).schemas().values())).state


def reason(pipeline: Pipeline) -> str:
    done = spawn("status", "-c", pipeline.definition, "--json", environment={"CDC_TEST_DSN": pipeline.dsn})
    problems = json.loads(done.output)["result"]["problems"]
    return str(next((p["message"] for p in problems if p["subject"] == "table shop.t"), ""))
