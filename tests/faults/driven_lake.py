"""`python -m tests.faults.driven_lake FOLDER`: a driver without Spark that brings FOLDER/lake to the end of FOLDER/log.

It publishes after every few transactions, and goes on from the record as any driver does.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from cdc import metrics
from cdc.catalog import Catalog
from cdc.log.read import LogReader
from cdc.position import Position
from pipelines.apply import SinkLoop
from pipelines.folding.by_size import RangeFold
from pipelines.running.cuts import Cuts
from pipelines.running.progress import Progress
from pipelines.sinks.delta import DeltaSettings, DeltaSink

FEW = 6
"""Transactions of a batch."""


def lake_in(folder: Path) -> str:
    """Path of the sink."""
    return f"{folder}/lake/{{schema}}/{{table}}"


def drive(folder: Path) -> None:
    """Apply what the log holds."""
    log = LogReader(folder / "log")
    with (
        Catalog.open(f"sqlite:///{folder}/catalog.db") as catalog,
        closing(DeltaSink(DeltaSettings("lake", lake_in(folder)))) as sink,
    ):
        progress = Progress("held", "lake", metrics.Figures())
        loop = SinkLoop(sink, RangeFold(log, "lake", ("*.*",)), Cuts(catalog, "held"), progress)
        loop.open()
        rows = log.rows(loop.position, log.durable or Position(0))
        ends = sorted({position for batch in rows for position in batch.column("position").to_pylist()})
        for end in [*ends[FEW - 1 :: FEW], *ends[-1:]]:
            loop(None, Position(end))
        loop.drain()


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
