"""Folding one range for one sink: on the driver while that is faster than starting a Spark job, in Spark beyond."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.change import LOG_SCHEMA, ROW_OPERATIONS
from cdc.failpoint import hit
from cdc.log.ranges import TableSelection
from cdc.log.reader import LogReader, read_file
from cdc.position import Position
from cdc.table import matches
from pipelines.folding.every_change import as_copied, every_change
from pipelines.folding.fold import fold
from pipelines.folding.folded_batch import FoldedBatch, take_apart
from pipelines.folding.range_statistics import SURVEY_COLUMNS, survey
from pipelines.folding.spark_fold import fold_frame
from pipelines.source.data_source import rows_between

SMALL: Final = 50_000
"""Rows of the log's files in a range up to which it is folded on the driver."""
WHOLE_BYTES: Final = 192 << 20
"""Bytes of those files up to which it is as well if no image is partial: 2 million rows in three seconds, where Spark
on two cores takes ten. In memory they are three times as much; partial images are folded one by one."""
_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))


class RangeFolder:
    """Folds ranges of one log for one sink; the view of the log is the caller's to refresh."""

    def __init__(
        self,
        change_log: LogReader,
        sink: str,
        tables: tuple[str, ...],
        keeps_history: Callable[[str], bool] | None = None,
    ) -> None:
        """keeps_history: of which tables, by topic, every change is wanted and not what the changes come to."""
        self.log, self._sink, self._tables = change_log, sink, tables
        self._keeps_history = keeps_history
        self.small = SMALL
        """Rows of a range that needs no Spark, and of a part of one whose every change is wanted."""
        self.whole_bytes = WHOLE_BYTES
        """Of a range without partial images that needs no Spark."""

    def is_small(self, after: Position, upto: Position) -> bool:
        """Whether the range (after, upto] needs no Spark."""
        files = self.log.files(after, upto)
        if sum(file.rows for file in files) <= self.small:
            return True
        return not any(file.partial for file in files) and sum(file.size for file in files) <= self.whole_bytes

    def __call__(
        self, rows: DataFrame | SparkSession | None, after: Position, upto: Position, relation: int | None = None
    ) -> FoldedBatch:
        """The range (after, upto]; rows: a frame of the log that holds it, or the session to read it with.

        They are looked at only when the range is large. relation: the one that is wanted; others may be there as well.
        """
        since = self._since(after)
        if self.is_small(after, upto):
            return self._here(self.log.rows(after, upto, topics=self._wants), after)
        if rows is not None:
            kept = self._with_history_at(upto)
            folded = self._in_spark(self._frame(rows, after, upto, relation), (after, upto), kept, since)
            found = self._single_changes((after, upto), kept if relation is None else kept & {relation}, since)
        else:
            raise ValueError(
                f"range ({after}, {upto}] of sink {self._sink!r} is large: expected a frame to fold it from"
            )
        return self._taken_apart(folded, found, kept, after)

    def _here(self, read: Iterable[pa.RecordBatch], after: Position) -> FoldedBatch:
        rows = pa.Table.from_batches(read, LOG_SCHEMA)
        kept = self._with_history(latest_topics(rows))
        single = single_changes(rows, kept, self._since(after))
        folded = fold(rows.filter(pc.invert(single)), sink=self._sink)
        return self._taken_apart(folded, rows.filter(single), kept, after)

    def _taken_apart(self, folded: pa.Table, single: pa.Table, kept: AbstractSet[int], after: Position) -> FoldedBatch:
        hit("after_fold")
        if kept:
            folded = pa.concat_tables([with_copied(folded, kept), every_change(single, sink=self._sink)])
        since = self._since(after)
        return replace(take_apart(folded), since=0 if since == after else int(since))

    def _since(self, after: Position) -> Position:
        """Where single changes begin: of what was trimmed there are none, but what they come to."""
        trimmed = self.log.compacted if after < self.log.oldest else None
        return after if trimmed is None else trimmed.horizon

    def slices(
        self, session: SparkSession | None, after: Position, upto: Position, relation: int
    ) -> Iterator[tuple[FoldedBatch, int]]:
        """The range of one relation as batches with their ends: one, or where every change is wanted several.

        Those several need no session, whatever their size: each is of about SMALL rows, or one transaction.
        """
        if relation not in self._with_history_at(upto):
            yield self(session, after, upto, relation), int(upto)
            return
        only = TableSelection(relations=(relation, relation))
        while after < upto:
            small = self.log.latest_boundary(after, self.small)
            end = min(upto, small) if small > after else upto
            yield self._here(self.log.rows(after, end, topics=self._wants, only=only), after), int(end)
            after = end

    def _frame(
        self, rows: DataFrame | SparkSession, after: Position, upto: Position, relation: int | None
    ) -> DataFrame:
        # who planned a frame may have seen the log before it was trimmed, with other rows than are surveyed
        if not isinstance(rows, DataFrame):
            rows = rows_between(rows, self.log, self._tables, after, upto)
        elif after < self.log.oldest:
            rows = rows_between(rows.sparkSession, self.log, self._tables, after, upto)
        return rows if relation is None else rows.where(F.col("relation") == relation)

    def _in_spark(
        self, rows: DataFrame, within: tuple[Position, Position], kept: AbstractSet[int], since: Position
    ) -> pa.Table:
        """The range folded, but for the single changes of tables whose history is kept."""
        after, upto = within
        rows = rows.where((F.col("position") > int(after)) & (F.col("position") <= int(upto)))
        if kept:
            single = F.col("relation").isin(*kept) & F.col("op").isin(*ROW_OPERATIONS)
            rows = rows.where(~(single & ((F.col("position") > int(since)) | F.col("key").isNull())))
        narrow = (read_file(file, after, upto, list(SURVEY_COLUMNS)) for file in self.log.files(after, upto))
        return fold_frame(rows, sink=self._sink, survey=survey(narrow, sink=self._sink)).toArrow()

    def _single_changes(self, within: tuple[Position, Position], kept: AbstractSet[int], since: Position) -> pa.Table:
        if not kept:
            return LOG_SCHEMA.empty_table()
        read = self.log.rows(*within, topics=self._wants, only=TableSelection(relations=(min(kept), max(kept))))
        found = [rows.filter(single_changes(rows, kept, since)) for rows in read]
        return pa.Table.from_batches(found, LOG_SCHEMA)

    def _with_history_at(self, upto: Position) -> AbstractSet[int]:
        if self._keeps_history is None:
            return frozenset()
        return self._with_history({r: schema.topic for r, schema in self.log.schemas(upto).items()})

    def _with_history(self, topics: Mapping[int, str]) -> AbstractSet[int]:
        """The relations of whose changes every one is wanted."""
        wanted = self._keeps_history
        return frozenset(() if wanted is None else (r for r, topic in topics.items() if wanted(topic)))

    def _wants(self, topic: str) -> bool:
        return matches(topic, self._tables)


def latest_topics(rows: pa.Table) -> dict[int, str]:
    """Relation → its topic in the latest of the rows."""
    named = rows.select(["relation", "topic", "position"]).filter(pc.is_valid(rows["relation"]))
    found = named.group_by(["relation", "topic"]).aggregate([("position", "max")]).sort_by("position_max")
    return dict(zip(found["relation"].to_pylist(), found["topic"].to_pylist(), strict=True))


def single_changes(rows: pa.Table | pa.RecordBatch, kept: AbstractSet[int], since: Position) -> Any:
    """Which log rows are changes that are not folded: of tables whose history is kept, from behind a position on.

    Rows without a key are not folded before it either; equal ones are there more than once.
    """
    of_kept = pc.and_(pc.is_in(rows["relation"], pa.array(sorted(kept), pa.int64())), pc.is_in(rows["op"], _ROWS))
    return pc.and_(of_kept, pc.or_(pc.greater(rows["position"], int(since)), pc.is_null(rows["key"])))


def with_copied(folded: pa.Table, kept: AbstractSet[int]) -> pa.Table:
    """Folded rows, of tables whose history is kept as a copy of the table would read them."""
    state = pc.and_(
        pc.is_in(folded["relation"], pa.array(sorted(kept), pa.int64())), pc.is_in(folded["op"], pa.array(["u", "d"]))
    )
    state = pc.fill_null(state, fill_value=False)
    return pa.concat_tables([folded.filter(pc.invert(state)), as_copied(folded.filter(state))])
