"""The log of views: a second log of the same format, with the changes of the views, and what they were computed from.

Its only writer is the apply process. A change has the position of the cut of the inputs at which it was computed, so
the log of views is at most as far as the sink that the views read. All changes of one cut are one commit. The commit
says which versions of the inputs the views were computed from and which definition of each view was used. So a crash
at any point repeats the computation of one cut: files without a commit are never read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc.failpoint import hit
from cdc.log.bucket_files import Root
from cdc.log.disk_format import CommitSource, LogIdentity
from cdc.log.file_selection import TableSelection
from cdc.log.reader import LogReader
from cdc.log.rows_at_position import RowsAtPosition
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.folding.fold import fold
from pipelines.views.changed_rows import log_rows


@dataclass(frozen=True, slots=True)
class InputVersion:
    """The version of one input at the cut from which the views were computed."""

    target: str
    """URI of the Delta table."""
    version: int
    relation: int
    """The log's number of the source table."""
    parked: tuple[tuple[str, ...], ...] = ()
    """Keys of the parked rows, of which the table has an older version or none."""


@dataclass(frozen=True, slots=True)
class ComputedView:
    """How the rows of a view in the log were computed."""

    fingerprint: str
    """Hash of the definition with which they were computed."""
    position: int
    """Position of the inputs of which they are the result."""
    floor: int | None = None
    """Time before which rows were left out, in microseconds since 1970 UTC; None: no row was left out."""


@dataclass(frozen=True, slots=True)
class ComputedFrom:
    """What the views were computed from at the end of the log of views."""

    inputs: Mapping[str, InputVersion] = field(default_factory=dict)
    """Topic → version of the input."""
    views: Mapping[str, ComputedView] = field(default_factory=dict)
    """Topic of each view that is complete → how it was computed."""

    def to_json(self) -> str:
        """Return the text that a commit contains."""
        inputs = {topic: asdict(found) for topic, found in self.inputs.items()}
        views = {topic: asdict(found) for topic, found in self.views.items()}
        return json.dumps({"inputs": inputs, "views": views}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of `to_json`; an empty text gives an empty object."""
        found = json.loads(text or "{}")
        inputs = {
            topic: InputVersion(**{**fields, "parked": tuple(map(tuple, fields["parked"]))})
            for topic, fields in found.get("inputs", {}).items()
        }
        return cls(inputs, {topic: ComputedView(**fields) for topic, fields in found.get("views", {}).items()})


@dataclass(frozen=True, slots=True)
class Cut:
    """The position of the inputs at which views are computed, and the commit time of the transaction at it."""

    position: Position
    committed_at: int
    """Microseconds since 1970 UTC; 0 if unknown."""


class LogOfViews:
    """The log of views of one pipeline; one thread of one process writes to it."""

    def __init__(self, root: Root, identity: LogIdentity, limits: SegmentLimits) -> None:
        """Open the log for writing; it is created if it does not exist."""
        self._root = root
        self.writer = LogWriter.open(root, identity, limits)
        self._reader: LogReader | None = None
        self._versions: tuple[Position | None, list[TableSchema]] = (None, [])
        """Every version of each view, oldest first, and the position at which they were read."""

    @property
    def position(self) -> Position:
        """The cut up to which the views were computed; 0 if they never were."""
        return self.writer.durable or Position(0)

    @property
    def computed_from(self) -> ComputedFrom:
        """What the last commit was computed from."""
        last = self.writer.last_commit
        return ComputedFrom.from_json("" if last is None else last.views)

    def schemas(self) -> dict[str, TableSchema]:
        """Return topic → latest version of each view that the log knows."""
        return {schema.topic: schema for schema in self._every_version()}

    def versions(self, topic: str) -> list[TableSchema]:
        """Return every version of a view, oldest first."""
        return [schema for schema in self._every_version() if schema.topic == topic]

    def state(self, schema: TableSchema) -> pa.Table:
        """Return the rows of a view at the end of the log, with the columns `key` and `after`."""
        return rows_of_view(self._current(), schema, self.position)

    def begin(self, cut: Cut) -> ViewCommit:
        """Begin the commit with the changes of the views at a cut, which must be after the last one."""
        return ViewCommit(self.writer, cut)

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
