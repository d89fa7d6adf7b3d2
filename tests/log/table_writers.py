"""The two tables of a log behind one interface, so that one test covers the writers of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cdc.bucket_files import Root
from cdc.log.compacted_table import read_compacted_state
from cdc.log.disk_format import CHANGES, COMPACTED
from cdc.log.reader import LogReader
from cdc.log.retrying_writer import RetryingWriter
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.log.rows import IDENTITY, LIMITS, info, row, table
from tests.log.simple_compaction import compact, open_compactor, read_range, read_rows

CommitAt = Callable[[int], object]
"""One commit, after which the table holds the two rows of the transaction at that position as well."""
LAST = 50
"""The last of the transactions, each at ten more than the one before."""


@dataclass(frozen=True, slots=True)
class TableWriter:
    """How a test writes and reads one of the two tables."""

    name: str
    create: Callable[[Root], None]
    """Create a log whose table contains the transaction at 10, in two commits."""
    writer: Callable[[Root], CommitAt]
    """Open a writer that continues the table; it commits at a position."""
    positions: Callable[[Root], list[int]]
    """Positions of all its rows."""

    @property
    def commit(self) -> str:
        """Regular expression: the request that makes a commit."""
        return rf"^PUT .*/{self.name}/_delta_log/\d{{20}}\.json"

    @property
    def file(self) -> str:
        """Regular expression: the request that writes a data file."""
        return rf"^PUT .*/{self.name}/segment(=|%3D)"


def append_transaction(writer: LogWriter | RetryingWriter, position: int) -> None:
    """A transaction of two rows."""
    writer.commit(writer.stage(table(row(position), row(position, 1))), info(position))


def log_positions(root: Root) -> list[int]:
    """Of the log's rows as a reader gets them."""
    log = LogReader(root)
    return [r["position"] for r in read_range(log, Position(0), log.durable or Position(0))]


def _appended(root: Root) -> None:
    append_transaction(LogWriter.open(root, IDENTITY, LIMITS), 10)


def _appender(root: Root) -> CommitAt:
    writer = LogWriter(root, LIMITS)
    return lambda position: append_transaction(writer, position)


def _compacted(root: Root) -> None:
    writer = LogWriter.open(root, IDENTITY, LIMITS)
    for position in range(10, LAST + 10, 10):
        append_transaction(writer, position)
    compact(root, 10)


def _compactor(root: Root) -> CommitAt:
    writer = open_compactor(root)
    return lambda position: compact(root, position, writer=writer)


def _in_runs(root: Root) -> list[int]:
    found = read_compacted_state(root)
    return [] if found is None else sorted(row["position"] for file in found.files for row in read_rows(file))


APPENDS = TableWriter(CHANGES, _appended, _appender, log_positions)
COMPACTS = TableWriter(COMPACTED, _compacted, _compactor, _in_runs)
BOTH = (APPENDS, COMPACTS)
