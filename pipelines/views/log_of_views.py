"""The log of views: a second log of the same format, with the changes of the views, and what they were computed from.

Its only writer is the apply process. One commit has the changes of all views at one cut of the inputs, at the position
of the cut. A view whose computation takes long is in a later commit. If the source is quiet then, this is another
commit at the same cut, and its position is directly after that of the last one. No transaction has such a position,
because the LSNs of commit records are multiples of 8.

A commit says of each view which cut and which versions of the inputs its rows were computed from, and with which
definition. So a crash at any point repeats computations: files without a commit are never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.bucket_files import Root, remove_folder
from cdc.failpoint import hit
from cdc.log.computed_views import ComputedFrom
from cdc.log.disk_format import CommitSource, LogFile, LogIdentity
from cdc.log.file_selection import TableSelection
from cdc.log.reader import LogReader
from cdc.log.rows_at_position import RowsAtPosition
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.folding.fold import fold
from pipelines.views.changed_rows import log_rows

BUILDS: Final = "_builds"
"""Folder, next to those of the log, for rows of views that are built; it is emptied when the log is opened."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The position of the inputs at which views are computed, and the commit time of the transaction at it."""

    position: Position
    committed_at: int
    """Microseconds since 1970 UTC; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class LogAsOf:
    """The log of views at a position; any thread may read it while the log grows."""

    root: Root
    position: Position

    def rows(self, schema: TableSchema) -> pa.Table:
        """Return the rows of a view, with the columns `key` and `after`."""
        return rows_of_view(LogReader(self.root), schema, self.position)

    def files(self, schema: TableSchema) -> tuple[LogFile, ...]:
        """Return the files with all changes of a view."""
        if not self.position:
            return ()
        only = TableSelection(relations=(schema.relation, schema.relation))
        return tuple(only.narrowed(LogReader(self.root).files(Position(0), self.position)))

    def row_count(self, schema: TableSchema) -> int:
        """Return the number of rows of the files with the changes of a view, which has no more rows than that."""
        return sum(file.rows for file in self.files(schema))


class LogOfViews:
    """The log of views of one pipeline; one thread of one process writes to it."""

    def __init__(self, root: Root, identity: LogIdentity, limits: SegmentLimits) -> None:
        """Open the log for writing; it is created if it does not exist."""
        self._root = root
        remove_folder(root / BUILDS)
        self.writer = LogWriter.open(root, identity, limits)
        self._reader: LogReader | None = None
        self._versions: tuple[Position | None, list[TableSchema]] = (None, [])
        """Every version of each view, oldest first, and the position at which they were read."""
        self._computed: tuple[Position | None, ComputedFrom] = (None, ComputedFrom())

    @property
    def position(self) -> Position:
        """The position of the last commit; 0 if there is none."""
        return self.writer.durable or Position(0)

    @property
    def computed_from(self) -> ComputedFrom:
        """What the last commit was computed from."""
        if self._computed[0] != self.position:
            last = self.writer.last_commit
            self._computed = self.position, ComputedFrom.from_json("" if last is None else last.views)
        return self._computed[1]

    def schemas(self) -> dict[str, TableSchema]:
        """Return topic → latest version of each view that the log knows."""
        return {schema.topic: schema for schema in self._every_version()}

    def versions(self, topic: str) -> list[TableSchema]:
        """Return every version of a view, oldest first."""
        return [schema for schema in self._every_version() if schema.topic == topic]

    def now(self) -> LogAsOf:
        """Return the log as the last commit has left it."""
        return LogAsOf(self._root, self.position)

    def begin(self, cut: Cut) -> ViewCommit:
        """Begin the commit with the changes of the views at a cut, which may be the last one again."""
        return ViewCommit(self.writer, replace(cut, position=Position(max(cut.position, self.position + 1))))

    def _every_version(self) -> list[TableSchema]:
        if self._versions[0] != self.position:
            self._versions = self.position, [schema for _, schema in self._current().schema_history()]
        return self._versions[1]

    def _current(self) -> LogReader:
        if self._reader is None:
            self._reader = LogReader(self._root)
        self._reader.refresh()
        return self._reader


class ViewCommit:
    """One commit of the log of views: the changes of all views at one cut."""

    def __init__(self, writer: LogWriter, cut: Cut) -> None:
        """cut: the cut, with the position of the commit."""
        self.position = int(cut.position)
        self._rows = RowsAtPosition(writer, cut.position, cut.committed_at)
        self.rows: dict[str, int] = {}
        """Topic → number of its changed rows."""

    @contextmanager
    def view(self, topic: str) -> Iterator[None]:
        """Add the changes of one view in the block. If it raises an error, no change of the view is added."""
        self.rows[topic] = 0
        try:
            with self._rows.all_or_none():
                yield
        except BaseException:
            del self.rows[topic]
            raise

    def add_version(self, schema: TableSchema) -> None:
        """Add a version of a view: its columns, its key and its state."""
        self._rows.add_version(schema)

    def add_rows(self, schema: TableSchema, rows: pa.Table) -> None:
        """Add rows of CHANGED_ROWS."""
        for batch in log_rows(rows, schema, self._rows.order).to_batches():
            self._rows.add(batch)
        self.rows[schema.topic] += rows.num_rows
        hit("view_rows_added")

    def end_build(self, schema: TableSchema) -> None:
        """Say that the view is complete with the rows of this commit: rows that it had before are deleted."""
        self._rows.add_end(schema)

    def commit(self, source: CommitSource, computed_from: ComputedFrom) -> None:
        """Commit all changes. source: the source server of the change log."""
        self._rows.stage()
        hit("views_staged")
        self._rows.commit(source, transactions=1 if self._rows.number else 0, views=computed_from.to_json())
        hit("views_committed")


def rows_of_view(log: LogReader, schema: TableSchema, upto: Position) -> pa.Table:
    """Return the rows of a view at a position of the log of views, with the columns `key` and `after`."""
    only = TableSelection(relations=(schema.relation, schema.relation))
    rows = pa.Table.from_batches(log.rows(Position(0), upto, only=only), LOG_SCHEMA)
    latest = fold(rows.filter(pc.equal(rows["relation"], schema.relation)), sink="")
    return latest.filter(pc.equal(latest["op"], Operation.UPDATE.value)).select(["key", "after"])
