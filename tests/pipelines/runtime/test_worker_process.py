"""A Python worker visits the objects of its modules in few of the collections that Spark starts after each task."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Final
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import SparkSession

from cdc.garbage import RARELY
from pipelines.runtime.worker_process import collect_garbage_rarely_in_task

OBJECTS: Final = 10_000
"""Number of objects that a task makes before each collection."""


def test_a_full_collection_freezes_what_is_left_when_modules_were_loaded(spark: SparkSession) -> None:
    def collect_twice(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kept: list[list[list[None]]] = []

        def frozen_by_collection() -> int:
            before = gc.get_freeze_count()
            kept.append([[] for _ in range(OBJECTS)])
            gc.collect()
            return gc.get_freeze_count() - before

        for _ in rows:
            collect_garbage_rarely_in_task()
            sys.modules[f"loaded_{uuid4().hex}"] = ModuleType("loaded")
            counts = {"with_module": [frozen_by_collection()], "without": [frozen_by_collection()]}
            yield pa.RecordBatch.from_pydict({**counts, "threshold": [gc.get_threshold()[0]]})

    schema = "with_module long, without long, threshold long"
    row = spark.range(0, 1, 1, 1).mapInArrow(collect_twice, schema).collect()[0]

    assert row["with_module"] >= OBJECTS
    assert row["without"] <= 0
    assert row["threshold"] == RARELY


def test_a_process_that_is_no_worker_keeps_its_collections() -> None:
    before = list(gc.callbacks)

    collect_garbage_rarely_in_task()

    assert gc.callbacks == before
