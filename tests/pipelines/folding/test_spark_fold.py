"""The fold as a Spark plan: equal to the fold in Arrow, for any histories."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pipelines.folding.fences_and_statistics import collect_statistics
from pipelines.folding.fold import fold
from pipelines.folding.spark_fold import FOLDED, fold_frame
from tests.pipelines.fold_model import SINK, to_arrow
from tests.pipelines.folding.test_fold import HISTORIES, change, histories, in_order, in_spark


@pytest.mark.parametrize(
    ("seed", "with_statistics", "count"),
    [
        (1, True, HISTORIES // 2),
        pytest.param(1, True, HISTORIES, marks=pytest.mark.slow),
        *(pytest.param(n, n % 2 == 0, HISTORIES, marks=pytest.mark.slow) for n in range(2, 23)),
    ],
)
def test_the_plan_and_the_specification_are_equal(
    spark: SparkSession, seed: int, with_statistics: bool, count: int
) -> None:
    _, rows = histories(seed, count)
    known = collect_statistics([to_arrow(rows)], sink=SINK) if with_statistics else None

    planned, specified = in_order(in_spark(spark, rows, known)), in_order(fold(to_arrow(rows), sink=SINK))
    for seen, expected in zip(planned, specified, strict=True):
        assert seen == expected


def test_the_plan_has_the_declared_schema(spark: SparkSession) -> None:
    frame = fold_frame(spark.createDataFrame(to_arrow([change(0, "c", "a", after={1: "a"})])), sink=SINK)

    assert frame.schema.simpleString() == FOLDED.simpleString()
