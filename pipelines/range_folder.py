"""Folds one range of the log for one sink, in this process or in Spark; `engine_decision.py` decides which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.config import EngineChoice
from cdc.errors import BatchTooLarge
from cdc.failpoint import hit
from cdc.log.file_selection import TableSelection
from cdc.log.reader import LogReader, read_file
from cdc.log_row import LOG_SCHEMA, ROW_OPERATIONS
from cdc.position import Position
from cdc.table import matches
from pipelines.engine_decision import ONE_MACHINE, Cores, Engine, EngineLimits, RangeSize, Waiting, decide
from pipelines.folding.fences_and_statistics import STATISTICS_COLUMNS, collect_statistics
from pipelines.folding.fold import fold
from pipelines.folding.folded_batch import FoldedBatch, split_by_table
from pipelines.folding.history_changes import as_copied_rows, every_change
from pipelines.folding.spark_fold import fold_frame
from pipelines.sinks.contract import SparkAwaited
from pipelines.source.data_source import rows_between

_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))


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
        self.log, self._sink, self._tables = change_log, sink, tables
        self._keeps_history = keeps_history
        self.limits = EngineLimits()
        self.choice = EngineChoice.AUTO
        self.is_cluster = False
        """Whether Spark's executors are other processes than this one."""
        self.last_engine = Engine.HERE
        """What folded the last range."""

    def size(self, after: Position, upto: Position) -> RangeSize:
        """Return what the log files of the range (after, upto] contain."""
        return RangeSize.of(self.log.files(after, upto)) if after < upto else RangeSize()

    def is_small(self, after: Position, upto: Position) -> bool:
        """Whether the range (after, upto] can be folded without Spark."""
        return self.limits.fits_here(self.size(after, upto))

    def __call__(
        self, rows: DataFrame | SparkSession | None, after: Position, upto: Position, relation: int | None = None
    ) -> FoldedBatch:
        """Fold the range (after, upto].

        rows: a frame of the log that contains the range, or a session to read the range with; None if the range is
        small, or if Spark has not started. relation: the only relation that the caller needs, None for all relations.
        The result may contain other relations as well. Raises SparkAwaited if a range for Spark comes without it, and
        BatchTooLarge if the range does not fit this process, which alone may fold it.
        """
        since = self._since(after)
        self.last_engine = self._engine(rows, after, upto)
        if self.last_engine is Engine.HERE:
            return self._fold_here(self.log.rows(after, upto, topics=self._is_selected), after)
        if rows is not None:
            kept = self._with_history_at(upto)
            folded = self._in_spark(self._frame(rows, after, upto, relation), (after, upto), kept, since)
            found = self._single_changes((after, upto), kept if relation is None else kept & {relation}, since)
        else:
            raise SparkAwaited(f"range ({after}, {upto}] of sink {self._sink!r} is too large to fold in this process")
        return self._to_batch(folded, found, kept, after)

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
        if not kept:
            return self._to_batch(fold(rows, sink=self._sink), rows.slice(0, 0), kept, after)
        single = single_changes(rows, kept, self._since(after))
        folded = fold(rows.filter(pc.invert(single)), sink=self._sink)
        return self._to_batch(folded, rows.filter(single), kept, after)

    def _to_batch(self, folded: pa.Table, single: pa.Table, kept: AbstractSet[int], after: Position) -> FoldedBatch:
        hit("after_fold")
        if kept:
            folded = pa.concat_tables([with_copied(folded, kept), every_change(single, sink=self._sink)])
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
        rows, or a single transaction, so this process folds it without Spark.
        """
        if relation not in self._with_history_at(upto):
            yield self(session, after, upto, relation), int(upto)
            return
        self.last_engine = Engine.HERE
        only = TableSelection(relations=(relation, relation))
        while after < upto:
            small = self.log.latest_boundary(after, self.limits.small_rows)
            end = min(upto, small) if small > after else upto
            yield self._fold_here(self.log.rows(after, end, topics=self._is_selected, only=only), after), int(end)
            after = end

    def _frame(
        self, rows: DataFrame | SparkSession, after: Position, upto: Position, relation: int | None
    ) -> DataFrame:
        # a frame planned before a trim has other rows than those that the statistics describe
        if not isinstance(rows, DataFrame):
            rows = rows_between(rows, self.log, self._tables, after, upto)
        elif after < self.log.oldest:
            rows = rows_between(rows.sparkSession, self.log, self._tables, after, upto)
        return rows if relation is None else rows.where(F.col("relation") == relation)

    def _in_spark(
        self, rows: DataFrame, within: tuple[Position, Position], kept: AbstractSet[int], since: Position
    ) -> pa.Table:
        """Fold the range in Spark.

        kept: the relations whose history the sink keeps. Their changes after `since` are not folded, and neither are
        their rows without a key: `single_changes` selects both.
        """
        after, upto = within
        rows = rows.where((F.col("position") > int(after)) & (F.col("position") <= int(upto)))
        if kept:
            single = F.col("relation").isin(*kept) & F.col("op").isin(*ROW_OPERATIONS)
            rows = rows.where(~(single & ((F.col("position") > int(since)) | F.col("key").isNull())))
        narrow = (read_file(file, after, upto, list(STATISTICS_COLUMNS)) for file in self.log.files(after, upto))
        return fold_frame(rows, sink=self._sink, statistics=collect_statistics(narrow, sink=self._sink)).toArrow()

    def _single_changes(self, within: tuple[Position, Position], kept: AbstractSet[int], since: Position) -> pa.Table:
        if not kept:
            return LOG_SCHEMA.empty_table()
        read = self.log.rows(*within, topics=self._is_selected, only=TableSelection(relations=(min(kept), max(kept))))
        found = [rows.filter(single_changes(rows, kept, since)) for rows in read]
        return pa.Table.from_batches(found, LOG_SCHEMA)

    def _with_history_at(self, upto: Position) -> AbstractSet[int]:
        if self._keeps_history is None:
            return frozenset()
        return self._with_history({r: schema.topic for r, schema in self.log.schemas(upto).items()})

    def _with_history(self, topics: Mapping[int, str]) -> AbstractSet[int]:
        """Return the relations whose history the sink keeps."""
        wanted = self._keeps_history
        return frozenset(() if wanted is None else (r for r, topic in topics.items() if wanted(topic)))

    def _is_selected(self, topic: str) -> bool:
        return matches(topic, self._tables)


def latest_topics(rows: pa.Table) -> dict[int, str]:
    """Return relation → topic, from the latest row of each relation."""
    named = rows.select(["relation", "topic", "position"]).filter(pc.is_valid(rows["relation"]))
    found = named.group_by(["relation", "topic"]).aggregate([("position", "max")]).sort_by("position_max")
    return dict(zip(found["relation"].to_pylist(), found["topic"].to_pylist(), strict=True))


def single_changes(rows: pa.Table | pa.RecordBatch, kept: AbstractSet[int], since: Position) -> Any:
    """Return a bool mask of the log rows that must not be folded, because the sink keeps the history of their relation.

    The mask is true for changes of the relations `kept` after position `since`. In these relations, it is true for rows
    without a key at every position: two equal rows are two rows, and a fold would join them.
    """
    of_kept = pc.and_(pc.is_in(rows["relation"], pa.array(sorted(kept), pa.int64())), pc.is_in(rows["op"], _ROWS))
    return pc.and_(of_kept, pc.or_(pc.greater(rows["position"], int(since)), pc.is_null(rows["key"])))


def with_copied(folded: pa.Table, kept: AbstractSet[int]) -> pa.Table:
    """Return the folded rows, with op `u` replaced by `r` in the relations `kept`, whose history the sink keeps.

    These rows have no `base`. They begin a history, as the rows of a full copy do.
    """
    state = pc.and_(
        pc.is_in(folded["relation"], pa.array(sorted(kept), pa.int64())), pc.is_in(folded["op"], pa.array(["u", "d"]))
    )
    state = pc.fill_null(state, fill_value=False)
    return pa.concat_tables([folded.filter(pc.invert(state)), as_copied_rows(folded.filter(state))])
