"""Moments far away, 9999 for what never ends: whoever writes them, others read the same."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.stores.lake_reader import read_target
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


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize(
    "shape",
    [
        "arrow by delta-rs",
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in ("arrow by Spark", "frame by Spark")),
    ],
)
def test_a_far_moment_is_the_same_to_every_reader(spark: SparkSession, tmp_path: Path, shape: str) -> None:
    writer = Writer.DELTA_RS if shape == "arrow by delta-rs" else Writer.SPARK
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", writer), spark)
    sink.open("log-1")
    for position in (10, 20):  # appended, then merged
        rows = [
            Row((f"{text}+00",), position, {1: f"{text}+00", 2: text, 3: text[:10]}, ordinal=n)
            for n, text in enumerate(MOMENTS)
        ]
        made = batch(rows, position - 10, position, SCHEMA)
        if shape == "frame by Spark" and made.rows is not None:
            frame = spark.createDataFrame(made.rows.drop_columns(["payload"]))
            made = replace(made, rows=None, frame=frame)
        record = sink.apply(made)
    wanted = [datetime.fromisoformat(text) for text in MOMENTS]
    found = sorted(read_target(record.target, record.version).read_all().to_pylist(), key=lambda row: row["plain"])
    assert [(row["at"], row["plain"], row["day"]) for row in found] == [
        (moment.replace(tzinfo=UTC), moment, date(moment.year, moment.month, moment.day)) for moment in wanted
    ]
    there = spark.read.format("delta").load(record.target).select("at", "plain").orderBy("plain").toArrow().to_pylist()
    assert [(row["at"], row["plain"]) for row in there] == [(row["at"], row["plain"]) for row in found]
