"""Many tables: what their first copy takes, one change in one of them, and some changes in fifty of them."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Final

from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.benchmarks import workloads
from tests.benchmarks.cost_pipeline import Pipeline
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import SOURCE_SETTINGS, execute, until

TABLES: Final = 1_000
QUICK_TABLES: Final = 200
ROWS: Final = 50
IDLE_AFTER: Final = 15.0
"""Seconds after the first copy before anything is measured."""
SINGLE: Final = 20
"""Number of single changes, each in another table, one a second."""
FIRST: Final = 101
"""Number of the first table that a transaction changes."""
TOUCHED: Final = 50
"""Number of tables that a transaction changes."""
CHANGES: Final = 5
"""Number of changes in each of these tables."""
TRANSACTIONS: Final = 5
"""Number of such transactions, one a second."""


def figures() -> dict[str, Figure]:
    """Return the figures without values."""
    return {
        "seconds.first_copy.1000_tables": Figure("s", at_most=6.0),
        "cpu_seconds.one_change.1000_tables": Figure("s", at_most=0.06),
        "seconds.50_tables_changed.1000_tables": Figure("s", at_most=0.5),
    }


def measure(folder: Path, found: dict[str, Figure], *, quick: bool) -> None:
    """Run a pipeline over the tables, and add one value to each figure."""
    tables = QUICK_TABLES if quick else TABLES
    work = workloads.ticking(tables, ROWS)
    with EmbeddedPostgres(folder / "postgres", version=18, settings=SOURCE_SETTINGS, tcp=True) as server:
        pipeline = Pipeline(server.dsn(), folder / "cdc", work)
        with pipeline.running(tables, idle_after=IDLE_AFTER):
            values = pipeline.first_copy_seconds, _one_change(pipeline, work.schema), _fifty(pipeline, work.schema)
    for figure, value in zip([found[name] for name in figures()], values, strict=True):
        figure.values.append(value)


def _one_change(pipeline: Pipeline, schema: str) -> float:
    """Return the CPU seconds of the whole pipeline for one change, without those of its idle time."""
    idle = pipeline.used(float(SINGLE))["pipeline"].cores
    before, began = pipeline.cpu_seconds(), time.monotonic()
    for number in range(SINGLE):
        execute(pipeline.dsn, f"UPDATE {schema}.t{number + 1} SET amount = amount + 1 WHERE id = 1")
        time.sleep(1.0)
    used, elapsed = pipeline.cpu_seconds() - before, time.monotonic() - began
    return (used - idle * elapsed) / SINGLE


def _fifty(pipeline: Pipeline, schema: str) -> float:
    """Return the mean seconds from the commit of a transaction that changes fifty tables until they are published."""
    topics, took = {f"{schema}.t{number}" for number in range(FIRST, FIRST + TOUCHED)}, []
    change = f"UPDATE {schema}.t%s SET amount = amount + 1 WHERE id <= {CHANGES}"
    block = f"DO $$ BEGIN FOR i IN {FIRST}..{FIRST + TOUCHED - 1} LOOP EXECUTE format('{change}', i); END LOOP; END $$"
    for _ in range(TRANSACTIONS):
        before = _versions(pipeline, topics)
        execute(pipeline.dsn, block)
        began = time.monotonic()
        until(partial(_have_passed, pipeline, topics, before), 60)
        took.append(time.monotonic() - began)
        time.sleep(1.0)
    return sum(took) / len(took)


def _have_passed(pipeline: Pipeline, topics: set[str], before: list[int]) -> bool:
    return all(now > then for now, then in zip(_versions(pipeline, topics), before, strict=True))


def _versions(pipeline: Pipeline, topics: set[str]) -> list[int]:
    record = pipeline.published()
    tables = [] if record is None else sorted(record.tables.values(), key=lambda table: table.topic)
    return [table.version or 0 for table in tables if table.topic in topics]
