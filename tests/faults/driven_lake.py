"""`python -m tests.faults.driven_lake FOLDER WRITER`: a driver that brings FOLDER/lake to the end of FOLDER/log.

It publishes after every few transactions, and goes on from the record as any driver does. Only the writer `spark` has
it start a session.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from cdc import metrics
from cdc.catalog import Catalog
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.runtime.spark_session import SparkSettings, spark_session
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink

FEW = {Writer.AUTO: 6, Writer.SPARK: 20}
"""Transactions of a batch: Spark needs seconds for each."""


def lake_in(folder: Path) -> str:
    """Path of the sink."""
    return f"{folder}/lake/{{schema}}/{{table}}"


def drive(folder: Path, writer: Writer) -> None:
    """Apply what the log holds."""
    log, few = LogReader(folder / "log"), FEW[writer]
    spark = spark_session(SparkSettings()) if writer is Writer.SPARK else None
    with (
        Catalog.open(f"sqlite:///{folder}/catalog.db") as catalog,
        closing(DeltaSink(DeltaSettings("lake", lake_in(folder), writer), spark)) as sink,
    ):
        progress = SinkFigures("held", "lake", metrics.Metrics())
        loop = SinkLoop(sink, RangeFolder(log, "lake", ("*.*",)), CutRequests(catalog, "held"), progress)
        loop.open()
        rows = log.rows(loop.position, log.durable or Position(0))
        ends = sorted({position for batch in rows for position in batch.column("position").to_pylist()})
        for end in [*ends[few - 1 :: few], *ends[-1:]]:
            loop(None, Position(end))
        loop.drain()


if __name__ == "__main__":
    drive(Path(sys.argv[1]), Writer(sys.argv[2]))
