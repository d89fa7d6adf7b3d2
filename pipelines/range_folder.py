"""Folds one range of the log for one sink: in this process or by executors; `engine_decision.py` decides.

The rows of a range that executors fold stay on the executors, table by table, if the sink writes them from there. Small
tables of the range come to the driver, and so do tables that the sink only takes on the driver. Of a table with history
the rows are its single changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from operator import attrgetter
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.config import EngineChoice
from cdc.errors import BatchTooLarge
from cdc.failpoint import hit
from cdc.log.file_selection import TableSelection
from cdc.log.reader import LogReader
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from cdc.table import TableSchema, matches
from pipelines.engine_decision import ONE_MACHINE, Cores, Engine, EngineLimits, RangeSize, Waiting, decide
from pipelines.folding.executor_fold import COLLECTED_BYTES, MAX_MOVES, ExecutorFold, LogRange, pieces_of_frame
from pipelines.folding.fences_and_statistics import RangeStatistics
from pipelines.folding.folded_batch import FoldedBatch, control_events, split_by_table
from pipelines.folding.folded_parts import FoldedTable
from pipelines.folding.history_changes import fold_with_history
from pipelines.folding.spark_fold import fold_frame
from pipelines.sinks.contract import SparkAwaited
from pipelines.source.data_source import rows_between

COLLECTED_ROWS: Final = 50_000
"""Maximum rows of small tables that come to the driver from a range that executors fold."""


class RangeFolder:
    """Folds ranges of one log for one sink; the caller refreshes the log reader."""

    def __init__(
        self,
        change_log: LogReader,
        sink: str,
        tables: tuple[str, ...],
        keeps_history: Callable[[str], bool] | None = None,
    ) -> None:
        """keeps_history: says for a topic whether the sink keeps the history of the table.

        None: the sink keeps no history of any table.
        """
        self.log = change_log
        self._sink = sink
        self._tables = tables
        self._keeps_history = keeps_history
        self.limits = EngineLimits()
        self.choice = EngineChoice.AUTO
        self.is_cluster = False
        """Whether Spark's executors are other processes than this one."""
        self.last_engine = Engine.HERE
        """What folded the last range."""
        self.collected_rows = COLLECTED_ROWS
        """Maximum rows of a range folded by executors that come to the driver, of the tables that the sink could take
        on the executors.
        """
        self.max_moves = MAX_MOVES
        """Maximum number of partial images that changed a key, in a range that is divided by key."""
        self.takes_parts: Callable[[TableSchema], bool] = lambda _schema: False
        """Whether the sink takes the folded rows of a table on the executors: `ExecutorSink.takes_parts`."""

    def size(self, after: Position, upto: Position) -> RangeSize:
        """Return what the log files of the range (after, upto] contain."""
        return RangeSize.of(self.log.files(after, upto)) if after < upto else RangeSize()

    def is_small(self, after: Position, upto: Position) -> bool:
        """Whether the range (after, upto] can be folded without Spark."""
        return self.limits.fits_here(self.size(after, upto))

    def end_of_micro_batch(self, after: Position, upto: Position) -> Position:
        """Return `upto`, or an earlier end if the folded rows of the range (after, upto] are too many for the driver.

        Only tables whose rows do not stay on the executors set a bound.
        """
        if all(self._stay_on_executors(schema) for schema in self.log.schemas(upto).values()):
            return upto
        limits = self.limits
        end = self.log.latest_boundary(after, limits.micro_batch_rows, limits.here_bytes)
        return min(upto, end) if self.log.leads(after, min(upto, end)) else upto

    def __call__(
        self, rows: DataFrame | SparkSession | None, after: Position, upto: Position, relation: int | None = None
    ) -> FoldedBatch:
        """Fold the range (after, upto].

        rows: a Spark session, or a frame of one, with which a large range is read; None if the range is small, or if
        Spark has not started. relation: the only relation that the caller needs, None for all relations.
        The result may contain other relations as well. Raises SparkAwaited if a range for Spark comes without it, and
        BatchTooLarge if the range does not fit this process, which alone may fold it.
        """
        self.last_engine = self._engine(rows, after, upto)
        if self.last_engine is Engine.HERE:
            return self._fold_here(self.log.rows(after, upto, topics=self._is_selected), after)
        if rows is not None:
            session = rows.sparkSession if isinstance(rows, DataFrame) else rows
            return self._by_executors(session, (after, upto), relation)
        raise SparkAwaited(f"range ({after}, {upto}] of sink {self._sink!r} is too large to fold in this process")

    def _engine(self, rows: DataFrame | SparkSession | None, after: Position, upto: Position) -> Engine:
        """Return what folds the range; a frame is a micro-batch of the streaming query, or a range of a replay."""
        size = self.size(after, upto)
        cores = Cores(self.is_cluster, free=1) if rows is not None else ONE_MACHINE
        last = Engine.SPARK if isinstance(rows, DataFrame) else Engine.HERE
        engine = decide(Waiting(size, size), self.choice, self.limits, cores, last).engine
        if engine is Engine.HERE and not self.limits.fits_here(size):
            raise BatchTooLarge(
                f"range ({after}, {upto}] of sink {self._sink!r} does not fit this process, and spark.engine is "
                f"{self.choice.value!r}: {size}"
            )
        return engine

    def _fold_here(self, read: Iterable[pa.RecordBatch], after: Position) -> FoldedBatch:
        rows = pa.Table.from_batches(read, LOG_SCHEMA)
        kept = frozenset[int]() if self._keeps_history is None else self._with_history(latest_topics(rows))
        return self._to_batch(fold_with_history(rows, kept, self._since(after), sink=self._sink), after)

    def _to_batch(self, folded: pa.Table, after: Position) -> FoldedBatch:
        hit("after_fold")
        since = self._since(after)
        return replace(split_by_table(folded), since=0 if since == after else int(since))

    def _since(self, after: Position) -> Position:
        """Return the position after which the log has single changes.

        This is `after`, or the horizon if changes after `after` were trimmed.
        """
        trimmed = self.log.compacted if after < self.log.oldest else None
        return after if trimmed is None else trimmed.horizon

    def slices(
        self, session: SparkSession | None, after: Position, upto: Position, relation: int
    ) -> Iterator[tuple[FoldedBatch, int]]:
        """Yield the range of one relation as pairs (batch, its end position). Raises SparkAwaited as `__call__` does.

        A large range of a table with history is divided into several batches. Each batch has about `limits.small_rows`
        rows, or a single transaction, so this process folds it without Spark. A transaction that does not fit is folded
        by executors, if there are any.
        """
        if relation not in self._with_history_at(upto):
            yield self(session, after, upto, relation), int(upto)
            return
        only = TableSelection(relations=(relation, relation))
        while after < upto:
            small = self.log.latest_boundary(after, self.limits.small_rows)
            end = min(upto, small) if small > after else upto
            if session is not None and self.choice is not EngineChoice.HERE and not self.is_small(after, end):
                yield self(session, after, end, relation), int(end)
            else:
                self.last_engine = Engine.HERE
                yield self._fold_here(self.log.rows(after, end, topics=self._is_selected, only=only), after), int(end)
            after = end

    def _by_executors(self, session: SparkSession, within: tuple[Position, Position], only: int | None) -> FoldedBatch:
        """Fold the range by Spark's executors; only: the only relation that is needed, None for all relations.

        The rows of large tables stay on the executors, if the sink takes them there. The others come to the driver.
        """
        after, upto = within
        kept, since = self._with_history_at(upto), self._since(after)
        tables = TableSelection(globs=self._tables, relations=None if only is None else (only, only))
        rows = LogRange(
            files=tuple(tables.narrowed(self.log.files(after, upto))),
            after=after,
            upto=upto,
            tables=tables,
            sink=self._sink,
            kept=frozenset(kept),
            since=int(since),
        )
        folding = ExecutorFold(session, rows, max_moves=self.max_moves)
        try:
            folded = folding.fold() if folding.is_divisible else folding.store(self._folded_by_sql(folding))
            parts = {table.relation: folding.parts_of(table) for table in self._left_on_executors(folded, upto)}
            collected = [table for table in folded if table.relation not in parts]
            self._check_size(collected, upto)
            images = folding.collect(collected)
            batch = self._to_batch(images, after)
            controls = control_events(folding.survey.controls)
        except BaseException:
            folding.release()
            raise
        if not parts:
            folding.release()
        return replace(batch, controls=controls, parts=parts, release=folding.release)

    def _check_size(self, collected: Sequence[FoldedTable], upto: Position) -> None:
        """Raise BatchTooLarge if the rows that come to the driver do not fit its memory."""
        size = sum(table.size for table in collected)
        if size <= self.limits.driver_bytes:
            return
        schemas, largest = self.log.schemas(upto), max(collected, key=attrgetter("size"))
        topic = schemas[largest.relation].topic if largest.relation in schemas else str(largest.relation)
        raise BatchTooLarge(
            f"the range of sink {self._sink!r} up to {upto} has {size:,} bytes of rows that executors do not write, "
            f"mostly of table {topic!r}, but the apply process may use {self.limits.driver_bytes:,} bytes for them",
            remedy="restart the apply process where it may use more memory, or let executors write the table: a Delta "
            "sink with 'writer: auto'",
        )

    def _folded_by_sql(self, folding: ExecutorFold) -> DataFrame:
        """Fold a range in which partial images connect too many keys as a Spark plan; return it as pieces.

        Tables with history are not part of the plan: `ExecutorFold` divides their changes.
        """
        rows = folding.rows
        frame = rows_between(folding.session, self.log, self._tables, rows.after, rows.upto)
        if rows.tables.relations is not None:
            frame = frame.where(F.col("relation").between(*rows.tables.relations))
        if rows.kept:
            frame = frame.where(~F.col("relation").isin(*rows.kept))
        fences = rows.fences(folding.survey.controls)
        statistics = RangeStatistics(partial=True, moves=True, fences=fences, keyless=True)
        pieces = pieces_of_frame(fold_frame(frame, sink=self._sink, statistics=statistics), folding.parts)
        return pieces.unionByName(folding.pieces_of_history()) if rows.kept else pieces

    def _stay_on_executors(self, schema: TableSchema) -> bool:
        """Return whether all folded rows of a table stay on the executors; true for a table that is not selected."""
        if not self._is_selected(schema.topic):
            return True
        return self.takes_parts(schema)

    def _left_on_executors(self, tables: Sequence[FoldedTable], upto: Position) -> list[FoldedTable]:
        """Return the tables whose rows stay on the executors: all that the sink takes there, but the smallest ones."""
        kept, schemas = self._with_history_at(upto), self.log.schemas(upto)
        candidates = [
            table
            for table in sorted(tables, key=attrgetter("rows"))
            if table.relation in schemas
            # a table whose key was dropped in the range has both kinds of rows
            and (table.relation in kept or table.keyless == (0 if schemas[table.relation].key else table.rows))
            and self.takes_parts(schemas[table.relation])
        ]
        rows = np.cumsum([table.rows for table in candidates])
        sizes = np.cumsum([table.size for table in candidates])
        left = (rows > self.collected_rows) | (sizes > COLLECTED_BYTES)
        return [table for table, stays in zip(candidates, left.tolist(), strict=True) if stays]

    def _with_history_at(self, upto: Position) -> AbstractSet[int]:
        if self._keeps_history is None:
            return frozenset()
        return self._with_history({r: schema.topic for r, schema in self.log.schemas(upto).items()})

    def _with_history(self, topics: Mapping[int, str]) -> AbstractSet[int]:
        """Return the relations whose history the sink keeps."""
        keeps_history = self._keeps_history
        return frozenset(() if keeps_history is None else (r for r, topic in topics.items() if keeps_history(topic)))

    def _is_selected(self, topic: str) -> bool:
        return matches(topic, self._tables)


def latest_topics(rows: pa.Table) -> dict[int, str]:
    """Return relation → topic, from the latest row of each relation."""
    named = rows.select(["relation", "topic", "position"]).filter(pc.is_valid(rows["relation"]))
    latest = named.group_by(["relation", "topic"]).aggregate([("position", "max")]).sort_by("position_max")
    return dict(zip(latest["relation"].to_pylist(), latest["topic"].to_pylist(), strict=True))
