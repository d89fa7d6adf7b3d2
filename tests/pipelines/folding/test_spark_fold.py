"""The fold as a Spark plan: equal to the fold in Arrow, for its examples and for any histories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from pipelines.folding.fences_and_statistics import RangeStatistics, collect_statistics
from pipelines.folding.fold import fold
from pipelines.folding.spark_fold import FOLDED, fold_frame
from tests.pipelines.fold_model import SINK, Row, to_arrow
from tests.pipelines.folding.test_fold import EXAMPLES, HISTORIES, RANGES, histories, in_order


def expect_equal(spark: SparkSession, rows: list[Row], known: RangeStatistics | None) -> None:
    frame = fold_frame(spark.createDataFrame(to_arrow(rows)), sink=SINK, statistics=known)
    assert frame.schema.simpleString() == FOLDED.simpleString()
    planned, specified = in_order(frame.toArrow()), in_order(fold(to_arrow(rows), sink=SINK))
    for seen, expected in zip(planned, specified, strict=True):
        assert seen == expected


def numbered(examples: list[list[Row]]) -> Iterator[list[Row]]:
    """Each example as relations of its own; a boundary has no relation."""
    for number, rows in enumerate(examples):
        own = [None if row["relation"] is None else number * RANGES + row["relation"] for row in rows]
        yield [row | {"relation": relation} for row, relation in zip(rows, own, strict=True)]


def test_the_plan_and_the_specification_make_the_same_of_every_example_and_of_random_histories(
    spark: SparkSession,
) -> None:
    """Those of one kind of plan are one range, as they may be in a log: a plan takes longer to make than to run."""
    _, some = histories(1, HISTORIES // 6)
    kinds: dict[tuple[bool, bool], list[Row]] = defaultdict(list)
    for rows in numbered([*EXAMPLES, some]):
        known = collect_statistics([to_arrow(rows)], sink=SINK)
        kinds[known.partial, known.moves] += rows
    assert len(EXAMPLES) > 14
    assert kinds.keys() == {(False, False), (True, False), (True, True)}
    for rows in kinds.values():
        expect_equal(spark, rows, collect_statistics([to_arrow(rows)], sink=SINK))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "with_statistics"), [(1, True), *((n, n % 2 == 0) for n in range(2, 23))])
def test_the_plan_and_the_specification_are_equal(spark: SparkSession, seed: int, with_statistics: bool) -> None:
    _, rows = histories(seed)
    expect_equal(spark, rows, collect_statistics([to_arrow(rows)], sink=SINK) if with_statistics else None)
