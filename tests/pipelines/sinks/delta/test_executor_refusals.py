"""Rows of a large batch that the target refuses: how many come to the driver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.position import Position
from pipelines.sinks.contract import TargetState
from tests.pipelines.cold_log import append, log_writer
from tests.pipelines.sinks.delta.test_executor_merge import first_copy
from tests.pipelines.test_both_ways import loop_in

pytestmark = pytest.mark.usefixtures("with_delta")


def test_more_refused_rows_than_may_be_parked_stop_the_table_before_they_come_to_the_driver(
    spark: SparkSession, tmp_path: Path
) -> None:
    append(log_writer(tmp_path / "log"), [first_copy()])
    rules = "[{match: shop.*, dead_letters: {stop_at: 1}}]"
    with loop_in(tmp_path / "lake", tmp_path / "log", spark, rules=rules) as loop:
        loop(spark, Position(100))
        (table,) = loop.record.tables.values()

    assert table.state == TargetState.FAILED
    assert re.match("CDC-3012 too many rows .*more than 1, .*an error is: column 'plain'", table.reason or "")
