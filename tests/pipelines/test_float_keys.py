"""A key of floats: -0 and 0 are two texts and one key, and NaN is a key like any other."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config.delta_sink import HistoryMode
from cdc.log.reader import LogReader
from cdc.targets.lake_reader import read_target
from cdc.targets.published_record import TargetState
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, Row, batch, column
from tests.contracts.histories import ALL_SETTINGS
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql

MADE = (
    "CREATE TABLE zero (k float8 PRIMARY KEY, n int, note text)",
    "ALTER TABLE zero ALTER note SET STORAGE EXTERNAL",
    "INSERT INTO zero SELECT k, 0, repeat(k::text, 3000) FROM unnest('{-0, NaN, 1.5, -Infinity, 7}'::float8[]) k",
)
CHANGES = (
    ("UPDATE zero SET k = '0' WHERE k = 0",),  # without the note, which is large and did not change
    ("UPDATE zero SET n = n + 1", "UPDATE zero SET n = n + 1 WHERE k = 'NaN'"),
    ("BEGIN; UPDATE zero SET k = '-0', n = 8 WHERE k = 0; UPDATE zero SET n = 9 WHERE k = 0; COMMIT",),
    ("BEGIN; DELETE FROM zero WHERE k = 0; INSERT INTO zero VALUES (0, 1, 'new'); COMMIT",),
    ("UPDATE zero SET k = '-0' WHERE k = 0", "DELETE FROM zero WHERE k = 0", "INSERT INTO zero VALUES (0, 2, 'newer')"),
    ("DELETE FROM zero WHERE k IN (0, 'NaN')",),
    ("INSERT INTO zero VALUES ('-0', 3, NULL), ('NaN', 3, NULL)",),
)
"""One range after another."""


def now(keeping: HistoryMode, rows: list[dict[str, Any]]) -> list[str]:
    """The rows of a target that are there now, with the sign of a zero."""
    if keeping is HistoryMode.CHANGES:
        latest = {str(row["k"] + 0): row for row in sorted(rows, key=_place) if row["_op"] in "crud"}
        rows = list(latest.values())
    gone = {
        HistoryMode.LATEST: lambda _: False,
        HistoryMode.VERSIONS: lambda row: row["__END_AT"] is not None,
        HistoryMode.MARKED: lambda row: row["_deleted"],
        HistoryMode.CHANGES: lambda row: row["_op"] == "d",
    }[keeping]
    return sorted(f"{row['k']!r} {row['n']} {row['note']}" for row in rows if not gone(row))


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return row["_position"], row["_ordinal"]


@pytest.mark.slow
def test_what_is_there_in_each_mode_is_what_the_source_has(tmp_path: Path, database: str) -> None:
    run_sql(database, *MADE)
    captured = Captured(tmp_path, database)
    captured.copy()
    loops = {}
    with Catalog.open(captured.definition.catalog.url) as catalog, ExitStack() as opened:
        for keeping, settings in ALL_SETTINGS.items():
            sink = DeltaSink(DeltaSettings(keeping.value, f"{tmp_path}/{keeping}/{{schema}}/{{table}}", table=settings))
            every = None if keeping is HistoryMode.LATEST else lambda _: True
            fold = RangeFolder(LogReader(tmp_path / "log"), keeping.value, ("*.*",), every)
            loops[keeping] = SinkLoop(
                sink, fold, CutRequests(catalog, "held"), SinkFigures("held", sink.name, metrics.Metrics())
            )
            loops[keeping].open()
            opened.callback(sink.close)
            opened.callback(loops[keeping].drain)
        for changes in ((), *CHANGES):
            run_sql(database, *changes)
            captured.stream()
            there = sorted(f"{k!r} {n} {note}" for k, n, note in rows_of(database, "SELECT * FROM zero"))
            for keeping, loop in loops.items():
                loop.advance()
                (record,) = loop._published.tables.values()
                assert record.state == TargetState.STREAMING, (keeping, changes, record.reason)
                found = now(keeping, read_target(record.target, record.version).read_all().to_pylist())
                assert found == there, (keeping, changes)


ZERO = replace(ORDERS, columns=(column(1, "id", "double precision", oid=701, key=0), *ORDERS.columns[1:]))


def put(key: str, item: str, position: int, **more: Any) -> Row:
    return Row((key,), position, {1: key, 2: item, 3: "1.00"}, **more)


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize(
    ("shape", "partial"),
    [
        ("arrow by copy-on-write", False),
        ("arrow by copy-on-write", True),
        *(
            pytest.param(shape, partial, marks=pytest.mark.slow)
            for shape in ("frame by Spark", "arrow by Spark")
            for partial in (False, True)
        ),
    ],
)
def test_both_writers_move_a_row_from_one_zero_to_the_other(
    spark: SparkSession, tmp_path: Path, shape: str, *, partial: bool
) -> None:
    writer = Writer.COPY_ON_WRITE if shape == "arrow by copy-on-write" else Writer.SPARK
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", writer), spark)
    sink.open("log-1")

    def applied(rows: list[Row], after: int, upto: int) -> list[tuple[float, str, str]]:
        made: TableBatch = batch(rows, after, upto, ZERO)
        if shape == "frame by Spark" and made.rows is not None:
            frame = spark.createDataFrame(made.rows.drop_columns(["payload"]))
            made = replace(made, rows=None, frame=frame)
        record = sink.apply(made)
        found = read_target(record.target, record.version).read_all().to_pylist()
        return sorted((row["id"], row["item"], str(row["price"])) for row in found)

    others = [put(str(n), "other", 10) for n in range(1, 400)]
    applied([put("-0", "a", 10), put("NaN", "n", 11), *others], 0, 20)
    more = {1: "0", 2: "b"} | ({} if partial else {3: "1.00"})
    moved = Row(("0",), 30, more, ordinal=1, base=("-0",) if partial else None, complete=not partial)
    left = Row(("-0",), 30, None)
    for rows in ([left, moved, put("NaN", "m", 31), put("7", "c", 32)], [moved, left]):
        found = [row for row in applied(rows, 20, 40) if row[1] != "other"]
        assert [row[1:] for row in found if math.isnan(row[0])] == [("m", "1.00")]
        assert [(repr(row[0]), *row[1:]) for row in found if not math.isnan(row[0])] == [
            ("0.0", "b", "1.00"),
            ("7.0", "c", "1.00"),
        ]
    assert [
        row for row in applied([Row(("0",), 50, None), Row(("NaN",), 50, None, ordinal=1)], 40, 60) if row[0] == 0
    ] == []
