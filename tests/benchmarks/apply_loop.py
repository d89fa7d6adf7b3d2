"""The apply loop over a log and one sink in this process, as the apply process runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cdc import metrics
from cdc.catalog import Catalog
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.contract import Sink
from pipelines.source.data_source import rows_between

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TABLES = ("*.*",)


class ApplyLoop:
    """Applies ranges of a log to one sink."""

    def __init__(self, folder: Path, log: Path, sink: Sink, session: SparkSession | None = None) -> None:
        """folder: of the catalog. session: folds ranges that do not fit this process; None: there are none."""
        folder.mkdir(parents=True)
        self._session, self._log = session, LogReader(log)
        catalog = Catalog.open(f"sqlite:///{folder}/catalog.db")
        self._fold = RangeFolder(self._log, sink.name, _TABLES)
        figures = SinkFigures("bench", sink.name, metrics.Metrics())
        self._loop = SinkLoop(sink, self._fold, CutRequests(catalog, "bench"), figures)
        self._loop.open()

    def catch_up(self, rows: int) -> None:
        """Apply all that the log has, in batches of at least so many rows."""
        end = self._log.durable or Position(0)
        while self._loop.position < end:
            self.step(min(end, self._log.latest_boundary(self._loop.position, rows)))

    def step(self, end: Position) -> None:
        """One batch up to end."""
        after = self._loop.position
        if self._session is None or self._fold.is_small(after, end):
            self._loop(None, end)
        else:
            self._loop(rows_between(self._session, self._log, _TABLES, after, end), end)
