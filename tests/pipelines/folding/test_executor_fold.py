"""The fold by executors: equal to the fold on the driver, for any log; what the driver gets of a range."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pyarrow as pa
from pyspark.sql import SparkSession

from cdc.log.disk_format import LogFile
from cdc.log.file_selection import TableSelection
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.folding.executor_fold import SPLIT_BYTES, ExecutorFold, LogRange, in_full_rounds
from pipelines.folding.fold import fold
from pipelines.folding.folded_batch import control_events, split_by_table
from tests.pipelines.cold_log import append, histories, interleaved, log_writer, transactions
from tests.pipelines.fold_model import SINK, Row

PARTS = 3


@contextmanager
def folding_of(spark: SparkSession, root: Path, parts: int = PARTS) -> Iterator[ExecutorFold]:
    """The fold of the whole log by executors."""
    log = LogReader(root)
    upto = log.durable or Position(0)
    files = tuple(log.files(Position(0), upto))
    selected = LogRange(files=files, after=Position(0), upto=upto, tables=TableSelection(), sink=SINK)
    folding = ExecutorFold(spark, selected, parts)
    try:
        yield folding
    finally:
        folding.release()


def on_driver(root: Path) -> pa.Table:
    """The log as the specification folds it."""
    log = LogReader(root)
    return fold(pa.Table.from_batches(log.rows(Position(0), log.durable or Position(0))), sink=SINK)


def sorted_rows(folded: pa.Table) -> list[Row]:
    """Folded rows in one order; an image has no order of its own."""
    rows = folded.to_pylist(maps_as_pydicts="strict")
    for row in rows:
        row["after"] = None if row["after"] is None else sorted(row["after"].items())
    return sorted(rows, key=lambda row: (row["relation"], row["position"], row["ordinal"], str(row["key"]), row["op"]))


def written(root: Path, rows: list[Row], random: Random) -> None:
    """A log with these rows, in files of a few transactions."""
    writer, left = log_writer(root), transactions(rows)
    while left:
        number = random.randint(1, 40)
        append(writer, left[:number])
        left = left[number:]


def test_executors_fold_any_log_as_the_driver_does(spark: SparkSession, tmp_path: Path) -> None:
    sources = histories(7, 40)
    written(tmp_path, interleaved(sources), Random(7))
    expected = split_by_table(on_driver(tmp_path))

    with folding_of(spark, tmp_path) as folding:
        found = {table.relation: table for table in folding.fold()}
        assert folding.survey.moves
        assert control_events(folding.survey.controls) == expected.controls
        assert found.keys() == {*expected.images["relation"].to_pylist()}
        assert sorted_rows(folding.collect([*found.values()])) == sorted_rows(expected.images)


def test_a_stage_ends_with_a_round_in_which_every_core_has_a_task() -> None:
    assert [in_full_rounds(tasks, 4) for tasks in (1, 3, 4, 5, 8, 25)] == [1, 3, 4, 8, 8, 28]


def test_files_of_one_size_are_read_by_tasks_that_end_together(spark: SparkSession) -> None:
    """Fifty files of which two and a half make a task: read one after the other, the last task would be alone."""
    size = SPLIT_BYTES * 2 // 5
    files = tuple(
        LogFile(path=str(number), rows=100_000, size=size, first=Position(number), last=Position(number), segment=0)
        for number in range(1, 51)
    )
    selected = LogRange(files=files, after=Position(0), upto=Position(50), tables=TableSelection(), sink=SINK)
    cores = spark.sparkContext.defaultParallelism
    folding = ExecutorFold(spark, selected)
    groups = [len(group) for group in folding.groups]

    assert len(groups) % cores == 0
    assert folding.parts % cores == 0
    assert set(groups) <= {2, 3}
    assert groups == sorted(groups, reverse=True)
