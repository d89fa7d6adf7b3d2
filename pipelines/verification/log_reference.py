"""From the log: the rows that a table has at a position by what the log says, and what a sink says it holds there.

Nothing asks the source and nothing asks the apply process: a version of a Delta table and an opened index stand still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import LOG_SCHEMA
from cdc.config import DeltaSinkDefinition, SearchSinkDefinition
from cdc.errors import PositionNotReached
from cdc.log.ranges import TableSelection
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.postgres.key_ranges import Digest, KeyRange
from cdc.stores.lake import Lake
from cdc.stores.published import Published, TableRecord, TargetState
from cdc.stores.search_index import SearchIndex
from cdc.table import TableSchema
from pipelines.folding.fold import FOLDED_ARROW, fold
from pipelines.folding.keyless_fold import net_changes
from pipelines.replaying.log_contents import TableContents, read_contents
from pipelines.verification.canonical_rows import image_batch
from pipelines.verification.compare_rows import Rows
from pipelines.verification.expected_schema import ExpectedSchema
from pipelines.verification.reference import ComparedRows
from pipelines.verification.target_rows import SearchTargetRows, TargetRows, delta_target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LARGE: Final = 200_000
"""Rows of the log that are folded in this process at once: about a second, and 200 MB. More go to Spark."""


@dataclass(frozen=True, slots=True)
class SinkState:
    """A sink as it stands by itself."""

    record: Published
    index: SearchIndex | None
    """The opened index of a search sink: later commits do not change it."""


def standing(sink: DeltaSinkDefinition | SearchSinkDefinition) -> SinkState:
    """What the sink last published; raises PositionNotReached if it never has."""
    index = SearchIndex.open(sink.path) if isinstance(sink, SearchSinkDefinition) else None
    record = Lake.open(sink.path).published() if index is None else index.published
    if record is None:
        raise PositionNotReached(
            f"sink {sink.name!r} has published nothing yet", remedy="start 'cdc run' and try again"
        )
    return SinkState(record, index)


def targets_at_rest(
    log: LogReader, sink: DeltaSinkDefinition | SearchSinkDefinition, stand: SinkState
) -> dict[int, TargetRows]:
    """The tables that the sink says are exact, by relation.

    What another hand did to a Delta table since it was published is looked at as well, if nothing else can be on its
    way: while the log holds no more than the sink has, nobody of ours writes.
    """
    exact = [table for table in stand.record.tables.values() if table.state == TargetState.STREAMING]
    if stand.index is not None:
        return {table.relation: SearchTargetRows(stand.index, table.topic) for table in exact}
    newest = {table.relation: delta_target(table, None, _key(sink, table)) for table in exact}
    log.refresh()  # behind it: what was open before saw nothing of what has come since
    if log.durable is not None and log.durable <= stand.record.position:
        return {**newest}
    versions = stand.record.versions
    return {table.relation: delta_target(table, versions.get(table.target), _key(sink, table)) for table in exact}


def _key(sink: DeltaSinkDefinition | SearchSinkDefinition, table: TableRecord) -> list[str]:
    return [] if table.schema is None else ExpectedSchema.of(sink, TableSchema.from_json(table.schema)).key


@dataclass(frozen=True, slots=True)
class ExpectedState:
    """The log as one sink should show it at a position."""

    log: LogReader
    sink: DeltaSinkDefinition | SearchSinkDefinition
    upto: Position
    spark: Callable[[], SparkSession]
    """Starts the session at the first call, for a table with more than LARGE rows."""
    large: int = LARGE

    def tables(self) -> list[TableContents]:
        """The sink's tables."""
        return read_contents(self.log, self.upto, sink=self.sink.name, globs=self.sink.tables)

    def folded(self, table: TableContents) -> Iterator[pa.Table]:
        """Its rows as FOLDED_ARROW, in parts."""
        if table.rows <= self.large:
            return iter([self._here(table)])
        # late: most tables do without Spark, which takes a second to import
        folding, source = (
            import_module("pipelines.replaying.large_table_fold"),
            import_module("pipelines.source.data_source"),
        )
        rows = source.rows_between(self.spark(), self.log, self.sink.tables, Position(0), self.upto)
        parts: Iterator[pa.Table] = folding.collect_parts(folding.fold_table(rows, table, self.sink.name))
        return parts

    def _here(self, table: TableContents) -> pa.Table:
        only = TableSelection(relations=(table.relation, table.relation))
        read = self.log.rows(Position(0), self.upto, only=only)
        rows = pa.Table.from_batches(read, LOG_SCHEMA).filter(pc.field("relation") == table.relation)
        folded = fold(rows, sink=self.sink.name).filter(pc.field("op").isin(["u", "d"]))
        if not table.schema.key and folded.num_rows:
            folded = net_changes(folded, table.schema)
        return folded.filter(pc.field("op") == "u").cast(FOLDED_ARROW)


class LogTable:
    """One table as the log says it is."""

    def __init__(self, state: ExpectedState, table: TableContents) -> None:
        self._state, self._table = state, table

    def rows(self, wanted: ComparedRows, _within: KeyRange | None = None) -> Rows:
        """Reads the columns as canonical text; what the log does not know of a row is null."""
        columns = [wanted.schema.sent[place] for place in wanted.places]

        def rows() -> Iterator[pa.RecordBatch]:
            for part in self._state.folded(self._table):
                for chunk in part["after"].chunks:
                    yield wanted.masked(image_batch(chunk, columns, wanted.kinds))

        return rows

    def count(self, _wanted: ComparedRows, _within: KeyRange | None = None) -> int:
        """How many rows there are."""
        return sum(part.num_rows for part in self._state.folded(self._table))

    def digest(self, _wanted: ComparedRows, _within: KeyRange | None = None) -> Digest | None:
        """None: the rows have to be read."""
        return None
