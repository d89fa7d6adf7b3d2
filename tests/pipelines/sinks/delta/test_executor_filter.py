"""The filter `where` for partial images on executors: it is applied before base rows are searched."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.config import EngineChoice
from cdc.position import Position
from tests.pipelines.cold_log import append, log_writer
from tests.pipelines.fold_model import Row, log_row
from tests.pipelines.sinks.delta.test_executor_merge import first_copy, written
from tests.pipelines.test_both_ways import loop_in, parked_in, rows_of

pytestmark = pytest.mark.usefixtures("with_delta")
RULES = "[{match: shop.*, transform: {where: plain > 10}}]"
KEPT = {str(key) for key in range(11, 40)}
"""Keys of the first copy that the filter accepts; the value of a row is its key."""
UPDATES = {"12": "5", "20": "", "30": "77", "70": "5", "71": "", "72": "77"}
"""Key → value in a partial image; the target has no row of the last three."""


def partial_images() -> list[Row]:
    images = enumerate(UPDATES.items())
    return [
        written(log_row(1, (200, n), "u", key=[key], after={1: key, 2: value}, partial=True))
        for n, (key, value) in images
    ]


@pytest.mark.parametrize("engine", [EngineChoice.HERE, EngineChoice.SPARK])
def test_a_rejected_partial_image_needs_no_base_row_and_an_unfit_one_is_parked(
    spark: SparkSession, tmp_path: Path, engine: EngineChoice
) -> None:
    writer = log_writer(tmp_path / "log")
    append(writer, [first_copy()])
    append(writer, [partial_images()])
    with loop_in(tmp_path / "lake", tmp_path / "log", spark, rules=RULES, engine=engine) as loop:
        for end in (100, 200):
            loop(None if engine is EngineChoice.HERE else spark, Position(end))
        (rows,) = rows_of(loop).values()
        parked = {row.key[0]: row.code for row in parked_in(loop)}

    assert {str(row["id"]) for row in rows} == KEPT - {"12"}
    assert {row["plain"] for row in rows if row["id"] == 30} == {77}
    assert parked == {"3": "CDC-3001", "7": "CDC-3001", "20": "CDC-3001", "71": "CDC-3001", "72": "CDC-3002"}
