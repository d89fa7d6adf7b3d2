"""A table without a key, from a real source to a Delta target and rebuilt from the log: the same multiset."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc import metrics
from cdc.catalog import Catalog
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.lake_reader import Lake, read_target
from cdc.targets.published_record import Published, TargetState
from pipelines.range_folder import RangeFolder
from pipelines.replaying.rebuild import LogSource, Rebuild, RebuildContext
from pipelines.replaying.table_sizes_in_log import read_contents
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql

MADE = (
    "CREATE TABLE bag (n int, note text, price int, sure boolean)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "ALTER TABLE bag ALTER note SET STORAGE EXTERNAL",
    "INSERT INTO bag SELECT i % 4, repeat('long ', 800) || i % 3, i % 2, NULL FROM generate_series(1, 60) i",
    "INSERT INTO bag VALUES (NULL, NULL, NULL, NULL), (NULL, NULL, NULL, NULL), (NULL, '', 0, true)",
)
CHANGES = (
    (
        "UPDATE bag SET price = price + 5 WHERE n = 1",
        "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE n = 2 LIMIT 7)",
    ),
    (
        "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE n IS NULL AND note IS NULL LIMIT 1)",
        "BEGIN; INSERT INTO bag SELECT * FROM bag WHERE n = 3; UPDATE bag SET sure = false WHERE n = 3; COMMIT",
    ),
    ("ALTER TABLE bag ADD more int DEFAULT 7", "UPDATE bag SET more = NULL WHERE n = 0", "DELETE FROM bag WHERE n = 1"),
)
EMPTIED = ("BEGIN; INSERT INTO bag VALUES (1); TRUNCATE bag; INSERT INTO bag VALUES (2), (2); COMMIT",)


@pytest.fixture(name="captured")
def _captured(tmp_path: Path, database: str) -> Captured:
    run_sql(database, *MADE)
    captured = Captured(tmp_path, database)
    captured.copy()
    return captured


def source_rows(captured: Captured) -> Counter[str]:
    return Counter(str(row) for (row,) in rows_of(captured.dsn, "SELECT to_json(bag) FROM bag"))


def target_rows(published: Published | None) -> Counter[str]:
    assert published is not None
    (record,) = published.tables.values()
    assert record.state == TargetState.STREAMING, record.reason
    rows = read_target(record.target, record.version).read_all().to_pylist()
    return Counter(str({name: value for name, value in row.items() if name[0] != "_"}) for row in rows)


def rebuilt(captured: Captured, spark: SparkSession | None) -> Published:
    """By Spark in several parts where there is one, else on the driver."""
    log = LogReader(captured.folder / "log")
    upto = log.durable or Position(0)
    with closing(
        DeltaSink(DeltaSettings("rebuilt", f"{captured.folder}/rebuilt{spark is None}/{{schema}}/{{table}}"))
    ) as sink:
        sink.open(log.log_id)
        limits = {} if spark is None else {"large": 10, "part": 25}
        means = RebuildContext(spark=lambda: spark, executors_can_write=lambda: True, **limits)  # type: ignore[arg-type, return-value]
        tables = read_contents(log, upto, sink="rebuilt", globs=("*.*",))
        return Rebuild(LogSource(log, "rebuilt", ("*.*",)), sink, means)(tables, upto)


@pytest.mark.slow
def test_the_target_has_every_row_as_often_as_the_source(captured: Captured, spark: SparkSession) -> None:
    log, lake = LogReader(captured.folder / "log"), Lake.open(f"{captured.folder}/lake/{{schema}}/{{table}}")
    sink = DeltaSink(DeltaSettings("lake", f"{captured.folder}/lake/{{schema}}/{{table}}"))
    with Catalog.open(captured.definition.catalog.url) as catalog, closing(sink):
        progress = SinkFigures("held", "lake", metrics.Metrics())
        loop = SinkLoop(sink, RangeFolder(log, "lake", ("*.*",)), CutRequests(catalog, "held"), progress)
        loop.open()
        for changes in ((), *CHANGES):
            run_sql(captured.dsn, *changes)
            captured.stream()
            loop.advance()
            assert target_rows(lake.published()) == source_rows(captured)
        assert target_rows(rebuilt(captured, None)) == target_rows(rebuilt(captured, spark)) == source_rows(captured)
        run_sql(captured.dsn, *EMPTIED)
        captured.stream()
        loop.advance()
        assert target_rows(lake.published()) == source_rows(captured)
        loop.drain()
