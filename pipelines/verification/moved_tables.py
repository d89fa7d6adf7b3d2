"""The tables of a cluster to which the log moves, compared with the rows of the log.

Each table of the cluster is read in the snapshot of the new slot, and compared column by column as text with the folded
rows of the log. No sink takes part, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from cdc.capture.source_move import NewCluster
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.postgres.publication import published_rows
from cdc.table import TableSchema, TableState
from pipelines.verification.compare_rows import compare
from pipelines.verification.consistent_cut import ConsistentCut
from pipelines.verification.expected_rows import ComparedRows, SourceRows
from pipelines.verification.log_rows import FoldedLog, LogRows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALL_TABLES: Final = ("*.*",)
NO_SINK: Final = ""
"""Name of a sink that does not exist: rows that are addressed to one sink are left out."""


@dataclass(frozen=True, slots=True)
class MovedTable:
    """The comparison of one table of the new cluster with the log."""

    topic: str
    relation: int
    compared: bool
    equal: bool
    rows: int = 0
    reason: str = ""
    """Why the table was not compared, or how it differs."""


def compare_tables(cluster: NewCluster, log: LogReader, spark: Callable[[], SparkSession]) -> Iterator[MovedTable]:
    """Compare every table of the new cluster that is live in the log, and name the others.

    spark: starts the session that folds large tables.
    """
    folded = FoldedLog(log, NO_SINK, ALL_TABLES, log.durable or Position(0), spark)
    rows_of = published_rows(cluster.reading, cluster.source.publication)
    cut = ConsistentCut(cluster.position, cluster.reading, {}, cluster.source.publication, rows_of)
    contents = {table.relation: table for table in folded.tables()}
    for schema in cluster.tables.copied:
        before = cluster.schemas.get(schema.relation)
        if before is None:
            yield _not_compared(schema, "the log does not have the table, so the reader copies it")
        elif before.state is not TableState.LIVE:
            yield _not_compared(schema, f"not compared: the log has it in state {before.state.value}")
        elif difference := _schema_difference(before, schema):
            yield _differing(schema, difference)
        else:
            yield _compare_rows(before, schema, SourceRows(cut), LogRows(folded, contents[schema.relation]))
    for schema in cluster.tables.dropped:
        yield _differing(schema, "the new server does not have the table")


def _not_compared(schema: TableSchema, reason: str) -> MovedTable:
    return MovedTable(schema.topic, schema.relation, compared=False, equal=False, reason=reason)


def _differing(schema: TableSchema, reason: str) -> MovedTable:
    return MovedTable(schema.topic, schema.relation, compared=True, equal=False, reason=reason)


def _schema_difference(before: TableSchema, now: TableSchema) -> str:
    """Return how the columns of the new server differ from those of the log; an empty text if they are the same."""
    ours, theirs = sorted(column.name for column in before.sent), sorted(column.name for column in now.sent)
    if ours != theirs:
        return f"the log has columns {ours!r}, the new server has {theirs!r}"
    if {column.name for column in before.key} != {column.name for column in now.key}:
        return "the new server has another key"
    # images of the log that are older than a column do not have it: they get its value from the schema
    missing = {column.name: column.missing for column in now.sent}
    lost = [column.name for column in before.sent if column.missing not in {None, missing[column.name]}]
    return f"the new server does not know the value of columns {lost!r} in older rows" if lost else ""


def _compare_rows(before: TableSchema, now: TableSchema, source: SourceRows, log: LogRows) -> MovedTable:
    place = {column.name: index for index, column in enumerate(before.sent)}
    ours, theirs = _columns(before, [place[column.name] for column in now.sent]), _columns(now, range(len(now.sent)))
    found = compare(source.rows(theirs), log.rows(ours), theirs.shape)
    if found.equal:
        return MovedTable(now.topic, now.relation, compared=True, equal=True, rows=found.source_rows)
    counts = found.mismatches.counts
    return _differing(
        now,
        f"{counts['missing']:,} rows are only on the new server, {counts['extra']:,} only in the log, and "
        f"{counts['differing']:,} have other values",
    )


def _columns(schema: TableSchema, indices: Sequence[int]) -> ComparedRows:
    """Return columns of a table that are compared as the text of the server."""
    return ComparedRows(schema, tuple(indices), (pa.string(),) * len(indices), (None,) * len(indices))
