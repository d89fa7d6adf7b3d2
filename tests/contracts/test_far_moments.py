"""Moments far away, 9999 for what never ends, and those of a clock change: all read what one writer wrote."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.targets.lake_reader import read_target
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, Row, batch, column

MOMENTS = ["0001-01-01 00:00:00", "1582-10-10 12:00:00", "1677-01-01 00:00:00.000001", "9999-12-31 23:59:59.999999"]
SCHEMA = replace(
    ORDERS,
    columns=(
        column(1, "at", "timestamp with time zone", oid=1184, key=0),
        column(2, "plain", "timestamp without time zone", oid=1114),
        column(3, "day", "date", oid=1082),
    ),
)


SHAPES = {
    "arrow by copy-on-write": Writer.COPY_ON_WRITE,
    "arrow by Spark": Writer.SPARK,
    "frame by Spark": Writer.SPARK,
}
QUICK = "arrow by copy-on-write"
NEVER_OR_TWICE = ["2026-03-29 02:30:00.5", "2026-10-25 02:30:00"]
"""Moments without a zone that clocks in some zones never show, or show twice."""


def image(text: str, position: int, ordinal: int) -> Row:
    return Row((f"{text}+00",), position, {1: f"{text}+00", 2: text, 3: text[:10]}, ordinal=ordinal)


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape == QUICK else pytest.mark.slow) for shape in SHAPES]
)
def test_a_far_moment_is_the_same_to_every_reader(spark: SparkSession, tmp_path: Path, shape: str) -> None:
    path = f"{tmp_path}/{{schema}}/{{table}}"
    sink = DeltaSink(DeltaSettings("lake", path, SHAPES[shape]), spark)
    sink.open("log-1")
    for position in (10, 20):  # appended, then merged
        made = batch([image(text, position, n) for n, text in enumerate(MOMENTS)], position - 10, position, SCHEMA)
        if shape == "frame by Spark" and made.rows is not None:
            frame = spark.createDataFrame(made.rows.drop_columns(["payload"]))
            made = replace(made, rows=None, frame=frame)
        sink.apply(made)
    sink.close()
    by_spark = DeltaSink(DeltaSettings("lake", path, Writer.SPARK), spark)
    by_spark.open("log-1")
    never, twice = NEVER_OR_TWICE
    moved = Row((f"{twice}+00",), 29, {1: f"{twice}+00", 2: twice}, base=(f"{MOMENTS[-1]}+00",), complete=False)
    record = by_spark.apply(batch([image(never, 28, 0), moved], 20, 30, SCHEMA))

    days = {text: text[:10] for text in (*MOMENTS, never)} | {twice: MOMENTS[-1][:10]}
    found = sorted(read_target(record.target, record.version).read_all().to_pylist(), key=lambda row: row["plain"])
    assert [(row["at"], row["plain"], row["day"]) for row in found] == sorted(
        (datetime.fromisoformat(text).replace(tzinfo=UTC), datetime.fromisoformat(text), date.fromisoformat(day))
        for text, day in days.items()
    )
    there = spark.read.format("delta").load(record.target).select("at", "plain").orderBy("plain").toArrow().to_pylist()
    assert [(row["at"], row["plain"]) for row in there] == [(row["at"], row["plain"]) for row in found]
