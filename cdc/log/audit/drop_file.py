"""Removal of an unreadable data file from the log, with a record of the loss for every reader.

There are three ways, and the first two lose nothing:

1. If the file's changes are compacted, all segments up to the file's segment are trimmed.
2. If a file of `compacted` is damaged and all changes still exist, the log is compacted again from its beginning.
3. Otherwise one commit removes the file and marks the tables in the file as needs_resync. A read that
   includes positions of lost rows must also include these marks (`lost_range_records.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final

import pyarrow as pa

from cdc.bucket_files import Root
from cdc.errors import ConfigError, LogCorrupt, LogFenced
from cdc.failpoint import hit
from cdc.log import lost_range_records, parquet_check, retired_files
from cdc.log.audit import delta_tables
from cdc.log.audit.rows import CommitClaim, FileContents
from cdc.log.compacted_table import CompactedWriter, read_compacted_state, secured_horizon
from cdc.log.disk_format import CHANGES, COMPACTED, ORDER, CommitInfo, LogFile, delta_statistics
from cdc.log.fenced_table import FencedTable
from cdc.log.reader import LogReader, read_file
from cdc.log.table_io import is_table, write_parquet
from cdc.log.trim_plan import oldest_copy_start
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.log_row import Operation, RowOrder, control_row
from cdc.position import Position
from cdc.table import TableSchema, TableState

WAL_ALIGNMENT: Final = 8
"""Alignment of WAL records in bytes (MAXALIGN): every commit LSN is a multiple of this number."""
_LIMITS: Final = SegmentLimits(size=1, age=0.0)
"""Segment limits for a LogWriter that only trims; it writes no files, so the values have no effect."""


class RecoveryWay(StrEnum):
    """Way to remove a damaged file from the log."""

    #: The file's segment and all earlier segments are trimmed, because their changes are compacted.
    TRIMMED = "trimmed"
    #: The log is compacted again from its beginning, because all changes still exist.
    START_OVER = "start_over"
    #: The file's rows are lost, and its tables are marked for a resync.
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedFile:
    """Result of the removal of a damaged file."""

    file: str
    """Path of the removed file relative to the log's root."""
    way: RecoveryWay
    first: Position
    last: Position
    marked: tuple[str, ...] = ()
    """Topics of the tables that were marked for a resync, sorted."""


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A damaged or missing data file of one of the log's tables."""

    log: LogReader
    root: Root
    table: str
    """Name of the log's table: CHANGES or COMPACTED."""
    name: str
    """Path of the file relative to the table's directory."""
    file: LogFile

    @classmethod
    def find(cls, root: Root, path: str) -> DamagedFile:
        """Find a damaged file by its path, which is absolute or relative to the log's root.

        Raises ConfigError if the log has no such file, or if the file is not damaged.
        """
        relative = path.removeprefix(f"{root}/")
        claim = next((claim for claim in delta_tables.read_log_tables(root).claims if claim.path == relative), None)
        log = LogReader(root)
        compacted = read_compacted_state(root, log.log_id)
        files = {file.path: file for file in (*log.every_file(), *(() if compacted is None else compacted.files))}
        if claim is None or (file := files.get(str(root / relative))) is None:
            raise ConfigError(f"the log has no file {path!r}", remedy="write the path as 'cdc log verify' prints it")
        if not _is_damaged(root, claim):
            raise ConfigError(
                f"file {relative!r} of the log is not damaged, so it is not removed",
                remedy="run 'cdc log verify' to see the damaged files",
            )
        return cls(log, root, claim.table, claim.name, file)

    @property
    def way(self) -> RecoveryWay:
        """Way in which `drop` removes the file. Raises LogCorrupt if only a backup can help."""
        if self.table == COMPACTED and not self.log.oldest:
            return RecoveryWay.START_OVER
        if self.table == CHANGES and self._trimmable() is not None:
            return RecoveryWay.TRIMMED
        if self.file.schemas_only:
            raise LogCorrupt(
                f"file {self.file.path!r} contains table schemas that other files need, so it cannot be dropped",
                remedy="restore the file from a backup; without a backup start a new log: see CDC-4002 in the runbook",
            )
        return RecoveryWay.GIVEN_UP

    def tables(self) -> list[TableSchema]:
        """Return the current schemas of the tables that have rows in the file.

        If the file cannot be read, these are all tables that may have rows in it.
        """
        known = self.log.schemas()
        found = _relations(self.file)
        if found is None:
            least, greatest = self.file.relations or (0, -1)
            found = {number for number in known if least <= number <= greatest}
        return [known[number] for number in sorted(found & known.keys())]

    def drop(self) -> DroppedFile:
        """Remove the file from the log. A running writer of the table fails at its next commit.

        If the process is killed, the method can be called again. Raises LogCorrupt as `way` does, LogFenced if another
        process commits at the same time.
        """
        way = self.way
        result = partial(
            DroppedFile, file=f"{self.table}/{self.name}", way=way, first=self.file.first, last=self.file.last
        )
        if way is RecoveryWay.TRIMMED:
            segments, upto = self._trimmable() or ((), Position(0))
            LogWriter(self.root, _LIMITS).trim(segments, upto)
            return result()
        if way is RecoveryWay.START_OVER:
            self._fence_reader()
            self._compactor().start_over()
            return result()
        tables = self.tables()
        self._give_up(tables)
        return result(marked=tuple(sorted(schema.topic for schema in tables if schema.state is not TableState.DROPPED)))

    def _trimmable(self) -> tuple[list[int], Position] | None:
        """Return the segments up to the file's segment, and the last position in these segments.

        Return None if these segments cannot be trimmed: one of them is the newest segment, is not compacted, or has
        changes that a running copy needs.
        """
        segments = [segment for segment in self.log.segments() if segment.segment <= self.file.segment]
        upto = max(one.last for one in segments)
        newest = max(one.segment for one in self.log.segments())
        began = oldest_copy_start(self.log) if not self.file.schemas_only else None
        is_needed = newest == self.file.segment or (began is not None and began < upto)
        if is_needed or not is_table(self.root / COMPACTED):
            return None
        is_compacted = upto <= secured_horizon(self.root, self.log.log_id)
        return ([one.segment for one in segments], upto) if is_compacted else None

    def _give_up(self, tables: Sequence[TableSchema]) -> None:
        sizes = {self.name: self.file.size} if self.table == CHANGES else {}
        recorded = {(gap.first, gap.last) for gap in lost_range_records.lost_ranges_in(self.log.every_file())}
        if sizes or (self.file.first, self.file.last) not in recorded:
            _commit_loss(self.root, _Loss(self.file, tables, sizes))
        if not sizes:
            hit("drop_marked")
            self._compactor().give_up(self.name)

    def _fence_reader(self) -> None:
        """Make an empty commit, so that a running reader cannot commit a trim that it has planned.

        Raises LogFenced if the log is already trimmed.
        """
        fenced = FencedTable(self.root / CHANGES)
        fenced.commit([], int(fenced.position or 0), _latest_info(fenced).to_metadata())
        if oldest := LogReader(self.root).oldest:
            raise LogFenced(
                f"the damaged file cannot be removed: changes up to {oldest!s} were trimmed while the command ran",
                remedy="stop the reader, and run the command again",
            )

    def _compactor(self) -> CompactedWriter:
        return CompactedWriter(self.root, self.log.log_id)


def position_behind(last: Position) -> Position:
    """Return `last` + 1, the position at which the log records a loss; `last` is the end of the log.

    The source must never use this position. The position of a commit is a multiple of WAL_ALIGNMENT, and that of a
    logical message is such a multiple minus 1. Raises LogCorrupt if `last` + 1 could be the position of a commit or a
    message.
    """
    if int(last) % WAL_ALIGNMENT >= WAL_ALIGNMENT - 2:
        raise LogCorrupt(
            f"the loss cannot be recorded at the position after the log's end {last!s}, because the source may use "
            "this position for the next transaction",
            remedy="start the reader, wait until it has captured a transaction or a heartbeat, stop it, and repeat "
            "the command",
        )
    return Position(last + 1)


def _is_damaged(root: Root, claim: CommitClaim) -> bool:
    place, contents = root / claim.table / claim.name, FileContents()
    try:
        if place.stat().st_size != claim.size:
            return True
        check = parquet_check.read(place, contents.add)
    except FileNotFoundError:
        return True
    return bool(check.unread) or any(True for _ in contents.faults(claim))


def _relations(file: LogFile) -> set[int] | None:
    """Return the relations of the file's rows.

    Return None if the column `relation` cannot be read, or if its values contradict the statistics in the commit.
    """
    try:
        found = read_file(file, Position(0), file.last, ["relation"])["relation"].drop_null().unique().to_pylist()
    except LogCorrupt:
        return None
    return set(found) if not found or (min(found), max(found)) == file.relations else None


@dataclass(frozen=True, slots=True)
class _Loss:
    file: LogFile
    tables: Sequence[TableSchema]
    removed: Mapping[str, int]
    """Files of `changes` to remove: path → size in bytes."""


def _commit_loss(root: Root, loss: _Loss) -> None:
    """Make one commit at the end of the log that removes the lost files and marks their tables as needs_resync."""
    fenced = FencedTable(root / CHANGES)
    info = _latest_info(fenced)
    actions: list[dict[str, Any]] = [FencedTable.removed(*file) for file in loss.removed.items()]
    if loss.tables:  # otherwise the file contained only messages
        info = replace(info, last=position_behind(info.last), committed_at=time.time_ns() // 1000)
        info = replace(info, rows=len(loss.tables), transactions=1)
        actions.append(_write_rows(fenced, loss.file, _rows(loss, info)))
    retired_files.record_removal(root, CHANGES, loss.removed, fenced.next_version)
    hit("drop_noted")
    fenced.commit(actions, int(info.last), {**info.to_metadata(), "cdc.dropped": loss.file.path})
    hit("drop_committed")


def _latest_info(fenced: FencedTable) -> CommitInfo:
    found = CommitInfo.from_metadata(fenced.latest_commit_info())
    if found is None:
        raise LogCorrupt(f"the latest commit of table {CHANGES!r} does not record the position at which the log ends")
    return found


def _rows(loss: _Loss, info: CommitInfo) -> pa.Table:
    reason = f"rows from {loss.file.first!s} to {loss.file.last!s} were lost with a damaged file of the log"
    return pa.Table.from_batches(
        control_row(
            RowOrder(int(info.last), ordinal, 0, info.committed_at),
            Operation.SCHEMA,
            schema.relation,
            schema.topic,
            _needing_resync(schema, reason).to_json(),
        )
        for ordinal, schema in enumerate(loss.tables)
    )


def _needing_resync(schema: TableSchema, reason: str) -> TableSchema:
    return schema if schema.state is TableState.DROPPED else schema.flagged(TableState.NEEDS_RESYNC, reason)


def _write_rows(fenced: FencedTable, file: LogFile, rows: pa.Table) -> dict[str, Any]:
    segment = max(map(int, fenced.files()["partition.segment"].to_pylist()))
    relative = f"segment={segment}/{lost_range_records.lost_range_file_name(file.first, file.last)}"
    size = write_parquet(rows.sort_by(ORDER), fenced.path / relative)
    return fenced.added(relative, size, rows.num_rows, delta_statistics(rows))
