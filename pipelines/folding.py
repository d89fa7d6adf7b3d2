"""Folding one range for one sink: on the driver while that is faster than starting a Spark job, in Spark beyond."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc.change import LOG_SCHEMA
from cdc.failpoint import hit
from cdc.log.read import LogReader, read_file
from cdc.position import Position
from cdc.table import matches
from pipelines.batch import FoldedBatch, take_apart
from pipelines.fold import fold
from pipelines.fold_spark import fold_frame
from pipelines.survey import SURVEY_COLUMNS, survey

SMALL: Final = 50_000
"""Rows of the log's files in a range up to which it is folded on the driver."""


class RangeFold:
    """Folds ranges of one log for one sink; the view of the log is the caller's to refresh."""

    def __init__(self, change_log: LogReader, sink: str, tables: tuple[str, ...]) -> None:
        self.log, self._sink, self._tables = change_log, sink, tables

    def is_small(self, after: Position, upto: Position) -> bool:
        """Whether the range (after, upto] needs no Spark."""
        return sum(file.rows for file in self.log.files(after, upto)) <= SMALL

    def __call__(self, rows: DataFrame | None, after: Position, upto: Position) -> FoldedBatch:
        """The range (after, upto]; rows: a frame of the log that holds it, looked at only when the range is large."""
        if self.is_small(after, upto):
            batches = self.log.rows(after, upto, topics=self._wants)
            folded = fold(pa.Table.from_batches(batches, LOG_SCHEMA), sink=self._sink)
        elif rows is not None:
            within = rows.where((F.col("position") > int(after)) & (F.col("position") <= int(upto)))
            narrow = (read_file(file, after, upto, list(SURVEY_COLUMNS)) for file in self.log.files(after, upto))
            folded = fold_frame(within, sink=self._sink, survey=survey(narrow, sink=self._sink)).toArrow()
        else:
            raise ValueError(
                f"range ({after}, {upto}] of sink {self._sink!r} is large: expected a frame to fold it from"
            )
        hit("after_fold")
        return take_apart(folded)

    def _wants(self, topic: str) -> bool:
        return matches(topic, self._tables)
