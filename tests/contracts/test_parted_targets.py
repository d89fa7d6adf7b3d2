"""Targets whose files are parted by a text: each text comes back as it was, or its table stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.config import SinkRule
from cdc.config.delta_sink import HistoryMode
from cdc.errors import CdcError
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import batch, put
from tests.contracts.histories import ALL_SETTINGS, RELATION, Lake
from tests.pipelines.fold_model import log_row

PARTED = (SinkRule(match="*.*", partition_by=("plain",)),)
LOST = {
    "": "NULL",
    "__HIVE_DEFAULT_PARTITION__": "NULL",
    "x" * 250: "too long",
    "/" * 84: "too long",
    "é" * 42: "too long",
}
HELD = [
    "%",
    "a/b",
    "plain=a",
    ".",
    "..",
    " ",
    "\n",
    "%2F",
    "é",
    "e\u0301",
    "😀",
    "NULL",
    "\x7f",
    "\\",
    "'",
    '"',
    "x" * 200,
]


@pytest.mark.parametrize("keeping", ALL_SETTINGS)
def test_a_text_is_in_the_target_as_it_was(tmp_path: Path, keeping: HistoryMode) -> None:
    lake = Lake(str(tmp_path), ALL_SETTINGS[keeping], rules=PARTED)
    rows = [log_row(RELATION, (5, n), "c", key=[str(n)], after={1: str(n), 2: text}) for n, text in enumerate(HELD)]
    lake.apply(rows, 0, 5)
    assert sorted(row["plain"] for row in lake.rows()) == sorted(HELD)


@pytest.mark.parametrize("keeping", ALL_SETTINGS)
def test_a_text_that_would_come_back_as_another_or_not_at_all_is_refused(tmp_path: Path, keeping: HistoryMode) -> None:
    lake = Lake(str(tmp_path), ALL_SETTINGS[keeping], rules=PARTED)
    lake.apply([log_row(RELATION, (5, 0), "c", key=["1"], after={1: "1", 2: "a"})], 0, 5)
    for text, why in LOST.items():
        with pytest.raises(CdcError, match=f"column 'plain' contains .*{why}"):
            lake.apply([log_row(RELATION, (6, 0), "c", key=["2"], after={1: "2", 2: text})], 5, 6)
        assert [row["plain"] for row in lake.rows()] == ["a"], text


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_spark_refuses_the_same_and_no_more(spark: SparkSession, tmp_path: Path) -> None:
    rules = (SinkRule(match="*.*", partition_by=("item",)),)
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", Writer.SPARK, rules=rules), spark)
    sink.open("log-1")

    def applied(text: str, position: int) -> Any:
        made = batch([put(position, text, position)], position - 1, position)
        assert made.rows is not None
        frame = spark.createDataFrame(made.rows.drop_columns(["payload"]))
        return sink.apply(replace(made, rows=None, frame=frame))

    for position, text in enumerate(["x" * 200, "a/b", "é" * 30], 1):
        applied(text, position)
    for text, why in LOST.items():
        with pytest.raises(PySparkException, match=f"ValueNotRepresentable: partition column 'item' contains .*{why}"):
            applied(text, 9)
