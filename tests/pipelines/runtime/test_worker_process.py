"""A Python worker visits the objects of its modules in few of the collections that Spark starts after each task."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from pipelines.runtime.worker_process import skip_modules_in_collections


def test_a_worker_skips_its_modules_after_the_first_task(spark: SparkSession) -> None:
    def count_objects(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in rows:
            yield pa.RecordBatch.from_pydict({"worker": [os.getpid()], "visited": [len(gc.get_objects())]})
        skip_modules_in_collections()

    visited: dict[int, list[int]] = {}
    for _ in range(10):
        row = spark.range(0, 1, 1, 1).mapInArrow(count_objects, "worker long, visited long").collect()[0]
        visited.setdefault(row["worker"], []).append(row["visited"])

    assert any(len(counts) > 1 for counts in visited.values())
    assert all(counts[-1] < counts[0] / 2 for counts in visited.values() if len(counts) > 1)


def test_a_process_that_is_no_worker_keeps_its_collections() -> None:
    before = list(gc.callbacks)

    skip_modules_in_collections()

    assert gc.callbacks == before
