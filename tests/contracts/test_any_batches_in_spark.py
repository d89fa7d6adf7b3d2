"""As test_any_batches, where Spark writes the target or computes columns of it and says which rows it has."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from cdc.config.delta_sink import HistoryMode
from pipelines.sinks.delta.settings import Writer
from tests.contracts.histories import ALL_SETTINGS, MODELS, Lake, kept
from tests.contracts.stories import HUGE, drive, evolving, log, ruled, sent_whole
from tests.pipelines.fold_model import PLAIN, Image

COMPUTED = {"computed": {"label": "concat(coalesce(long, '-'), '/', coalesce(plain, 0))", "twice": "plain * 2"}}
FILTERED = {**COMPUTED, "where": "plain IS NULL OR plain % 3 <> 0"}


def computed(image: Image) -> tuple[str, int | None]:
    """(label, twice) of a row."""
    number, long = image[PLAIN], image[HUGE]
    return f"{'-' if long is None else long}/{number or 0}", None if number is None else 2 * int(number)


def kept_by(image: Image) -> bool:
    """Whether the filter lets a row in."""
    number = image[PLAIN]
    return number is None or int(number) % 3 != 0


def held(lake: Lake) -> dict[int, tuple[str, int | None]]:
    """(label, twice) by key."""
    return {row["id"]: (row["label"], row["twice"]) for row in lake.rows()}


QUICK = pytest.param(Writer.SPARK, True, 37, 5)
"""Spark writes and computes; in test_transformed_targets it computes for the other writers.

A driver dies after it has changed the columns of a target with rows, and before it has merged any; two batches follow
each other, and the filter lets some of the rows in.
"""
CASES = [
    QUICK,
    *(
        pytest.param(*case, 6, marks=pytest.mark.slow)
        for case in product((Writer.INDEXED, Writer.COPY_ON_WRITE, Writer.SPARK), (False, True), range(6))
    ),
]


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize(("writer", "filtered", "seed", "transactions"), CASES)
def test_any_batches_give_the_same_computed_columns_and_filtered_rows(
    tmp_path: Path, spark: SparkSession, writer: Writer, filtered: bool, seed: int, *, transactions: int
) -> None:
    random = Random(f"{filtered} {seed}")
    rows = log(random, transactions)
    story = ruled(evolving(sent_whole(rows) if filtered else rows, random), **(FILTERED if filtered else COMPUTED))
    lake = Lake(str(tmp_path), ALL_SETTINGS[HistoryMode.LATEST], writer, spark, story.rules)
    drive(lake, story, random)

    expected = [row for row in MODELS[HistoryMode.LATEST](story.told, story.shown) if not filtered or kept_by(row[-1])]
    assert kept(lake, HistoryMode.LATEST, story.shown) == expected
    assert held(lake) == {int(image[1] or 0): computed(image) for *_, image in expected}


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keeping", ALL_SETTINGS)
def test_spark_writes_the_same_table_of_any_batches_while_its_columns_change(
    tmp_path: Path, spark: SparkSession, keeping: HistoryMode, seed: int
) -> None:
    random = Random(f"{keeping} {seed}")
    story = ruled(evolving(log(random), random))
    lake = Lake(str(tmp_path), ALL_SETTINGS[keeping], Writer.SPARK, spark, story.rules)
    drive(lake, story, random)

    assert kept(lake, keeping, story.shown) == MODELS[keeping](story.told, story.shown)
