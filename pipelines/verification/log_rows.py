"""For `cdc verify --against log`: the expected rows from the change log, and a sink opened at its published position.

This comparison needs neither the source nor the apply process. A sink is compared at its published position. That state
stays readable while apply continues, because a version of a Delta table and an opened index do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.sinks import DefinedSink
from cdc.errors import PositionNotReached
from cdc.log.file_selection import TableSelection
from cdc.log.reader import LogReader
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from cdc.postgres.key_range_digests import Digest, KeyRange
from cdc.table import TableSchema
from cdc.targets.published_record import Published, TableRecord, TargetState
from cdc.targets.sink_kinds import reading_of
from cdc.targets.sink_reading import PublishedTargets
from pipelines.folding.fold import FOLDED_ARROW, fold
from pipelines.folding.keyless_fold import net_changes
from pipelines.replaying.table_sizes_in_log import TableContents, read_contents
from pipelines.verification.canonical_text import image_batch
from pipelines.verification.compare_rows import Rows
from pipelines.verification.expected_rows import ComparedRows, ExpectedSchema
from pipelines.verification.target_rows import OpenedTargetRows, TargetRows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LARGE: Final = 200_000
"""Maximum log rows of a table that this process folds: this takes a second and 200 MB. Spark folds larger tables."""


@dataclass(frozen=True, slots=True)
class SinkAtRest:
    """A sink opened at the position of its last published record."""

    record: Published
    state: PublishedTargets


def open_at_rest(sink: DefinedSink) -> SinkAtRest:
    """Open a sink at its last published record. Raises PositionNotReached if nothing was published."""
    state = reading_of(sink).published_state(sink)
    record = state.record
    if record is None:
        raise PositionNotReached(
            f"sink {sink.name!r} has published nothing yet", remedy="start 'cdc run', then verify again"
        )
    return SinkAtRest(record, state)


def targets_at_rest(log: LogReader, sink: DefinedSink, at_rest: SinkAtRest) -> dict[int, TargetRows]:
    """Open the targets of the sink's tables in state `streaming`; return relation → target.

    If the sink has published all of the log, apply writes nothing. Then a Delta table is opened at its newest version,
    so that changes by another Delta client are found as well. Otherwise it is opened at the published version.
    """
    record, state = at_rest.record, at_rest.state
    streaming = [table for table in record.tables.values() if table.state == TargetState.STREAMING]

    def opened(*, newest: bool) -> dict[int, TargetRows]:
        return {
            table.relation: OpenedTargetRows(state.table(table, _key(sink, table), newest=newest))
            for table in streaming
        }

    newest = opened(newest=True)
    if not state.has_newer_versions:
        return newest
    # refreshed after the tables were opened: if nothing is durable beyond the published position, apply wrote nothing
    log.refresh()
    if log.durable is not None and log.durable <= record.position:
        return newest
    return opened(newest=False)


def _key(sink: DefinedSink, table: TableRecord) -> list[str]:
    return [] if table.schema is None else ExpectedSchema.of(sink, TableSchema.from_json(table.schema)).key


@dataclass(frozen=True, slots=True)
class FoldedLog:
    """The tables of one sink as they should be at a position, computed by folding the log."""

    log: LogReader
    sink: str
    """Name of the sink; rows that are addressed to another sink are left out."""
    globs: Sequence[str]
    """Globs of the topics that the sink contains."""
    upto: Position
    spark: Callable[[], SparkSession]
    """Returns the Spark session and starts it at the first call; used only for a table with more than `large` rows."""
    large: int = LARGE

    def tables(self) -> list[TableContents]:
        """Return what the log contains of each table of the sink, up to the position."""
        return read_contents(self.log, self.upto, sink=self.sink, globs=self.globs)

    def folded(self, table: TableContents) -> Iterator[pa.Table]:
        """Return the folded rows of a table in parts with the schema FOLDED_ARROW. Spark folds a large table."""
        if table.rows <= self.large:
            return iter([self._fold_here(table)])
        # imported late: most tables need no Spark, whose import takes a second
        folding, source = (
            import_module("pipelines.replaying.latest_rows"),
            import_module("pipelines.source.data_source"),
        )
        rows = source.rows_between(self.spark(), self.log, self.globs, Position(0), self.upto)
        parts: Iterator[pa.Table] = folding.fold_parts(rows, table, self.sink)
        return parts

    def _fold_here(self, table: TableContents) -> pa.Table:
        only = TableSelection(relations=(table.relation, table.relation))
        read = self.log.rows(Position(0), self.upto, only=only)
        rows = pa.Table.from_batches(read, LOG_SCHEMA).filter(pc.field("relation") == table.relation)
        folded = fold(rows, sink=self.sink).filter(pc.field("op").isin(["u", "d"]))
        if not table.schema.key and folded.num_rows:
            folded = net_changes(folded, table.schema)
        return folded.filter(pc.field("op") == "u").cast(FOLDED_ARROW)


class LogRows:
    """The expected rows of a table, folded from the change log."""

    def __init__(self, state: FoldedLog, table: TableContents) -> None:
        self._state, self._table = state, table

    def rows(self, wanted: ComparedRows, _within: KeyRange | None = None) -> Rows:
        """Read the compared columns of all rows as canonical text; a range is ignored.

        A row that is older than a column has the column's default or null.
        """
        columns = [wanted.schema.sent[index] for index in wanted.indices]

        def rows() -> Iterator[pa.RecordBatch]:
            for part in self._state.folded(self._table):
                for chunk in part["after"].chunks:
                    yield wanted.masked(image_batch(chunk, columns, wanted.kinds))

        return rows

    def count(self, _wanted: ComparedRows, _within: KeyRange | None = None) -> int:
        """Return the number of rows, after folding all of them; a range is ignored."""
        return sum(part.num_rows for part in self._state.folded(self._table))

    def digest(self, _wanted: ComparedRows, _within: KeyRange | None = None) -> Digest | None:
        """Return None, because computing a digest would require reading the rows."""
        return None
