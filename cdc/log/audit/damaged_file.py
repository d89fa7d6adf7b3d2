"""Removal of an unreadable data file from the log, with a record of the loss for every reader.

Of what is in it nothing may be lost at all: changes that are compacted are trimmed, and a state that all changes are
there for is compacted anew. Otherwise the tables in it are marked needs_resync in the commit that takes it out, and no
reader can end a range between the lost rows and those marks (`lost_ranges.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final

import pyarrow as pa
from deltalake.transaction import AddAction, RemoveAction

from cdc.change import Operation, RowOrder, control_row
from cdc.errors import ConfigError, LogCorrupt, LogFenced
from cdc.failpoint import hit
from cdc.log import lost_ranges, parquet_check, removed_files
from cdc.log.audit import table_claims
from cdc.log.audit.rows import CommitClaim, FileContents
from cdc.log.compacted_state import CompactedWriter, read_compacted_state, secured_horizon
from cdc.log.fenced_table import FencedTable
from cdc.log.layout import CHANGES, COMPACTED, ORDER, CommitInfo, LogFile, delta_statistics
from cdc.log.object_path import Root
from cdc.log.reader import LogReader, read_file
from cdc.log.retention_worker import oldest_copy_start
from cdc.log.segments import SegmentLimits
from cdc.log.storage import is_table, write_parquet
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.table import TableSchema, TableState

ALIGNED: Final = 8
"""Bytes: WAL records begin at multiples of it (MAXALIGN), and with them all commits."""
_LIMITS: Final = SegmentLimits(size=1, age=0.0)
"""Of a writer that appends nothing."""


class RecoveryWay(StrEnum):
    """What became of a file."""

    #: The segments up to its own were trimmed: what they come to is compacted.
    TRIMMED = "trimmed"
    #: All that was compacted is compacted anew, from changes that are all there.
    START_OVER = "start_over"
    #: It was given up, and the tables in it are marked.
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What was done."""

    file: str
    """Relative to the log's root."""
    way: RecoveryWay
    first: Position
    last: Position
    marked: tuple[str, ...] = ()
    """Topics that need a resync now."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A file of one of the log's tables that is not as it was written."""

    log: LogReader
    root: Root
    table: str
    """CHANGES or COMPACTED."""
    name: str
    """Relative to the table's directory."""
    file: LogFile

    @classmethod
    def find(cls, root: Root, path: str) -> Damaged:
        """The file at a path below the log's root, or at a whole one; reads it.

        Raises ConfigError if it is none of the log's files, or if nothing is wrong with it.
        """
        relative = path.removeprefix(f"{root}/")
        claim = next((claim for claim in table_claims.read_log_tables(root).claims if claim.path == relative), None)
        log = LogReader(root)
        held = read_compacted_state(root, log.log_id)
        files = {file.path: file for file in (*log.every_file(), *(() if held is None else held.files))}
        if claim is None or (file := files.get(str(root / relative))) is None:
            raise ConfigError(f"no file {path!r} in the log", remedy="write the path as 'cdc log verify' prints it")
        if not _is_damaged(root, claim):
            raise ConfigError(f"file {relative!r} is not damaged", remedy="'cdc log verify' names damaged files")
        return cls(log, root, claim.table, claim.name, file)

    @property
    def way(self) -> RecoveryWay:
        """What is to be done; raises LogCorrupt if there is nothing but a copy."""
        if self.table == COMPACTED and not self.log.oldest:
            return RecoveryWay.START_OVER
        if self.table == CHANGES and self._trim() is not None:
            return RecoveryWay.TRIMMED
        if self.file.schemas_only:
            raise LogCorrupt(
                f"file {self.file.path!r} contains table schemas that other files need, so it cannot be dropped",
                remedy="restore it from a backup; without a backup start a new log: see CDC-4002 in the runbook",
            )
        return RecoveryWay.GIVEN_UP

    def tables(self) -> list[TableSchema]:
        """Those that have rows in it, or may have if that cannot be read, as they are now."""
        known = self.log.schemas()
        found = _relations(self.file)
        if found is None:
            least, greatest = self.file.relations or (0, -1)
            found = {number for number in known if least <= number <= greatest}
        return [known[number] for number in sorted(found & known.keys())]

    def drop(self) -> Dropped:
        """Take it out. Killed anywhere it may be done again; whoever writes to the log meanwhile is fenced.

        Raises LogCorrupt as `way` does, LogFenced if somebody else commits meanwhile.
        """
        way = self.way
        done = partial(Dropped, file=f"{self.table}/{self.name}", way=way, first=self.file.first, last=self.file.last)
        if way is RecoveryWay.TRIMMED:
            segments, upto = self._trim() or ((), Position(0))
            LogWriter(self.root, _LIMITS).trim(segments, upto)
            return done()
        if way is RecoveryWay.START_OVER:
            self._keep_from_trimming()
            self._compactor().start_over()
            return done()
        tables = self.tables()
        self._give_up(tables)
        return done(marked=tuple(sorted(schema.topic for schema in tables if schema.state is not TableState.DROPPED)))

    def _trim(self) -> tuple[list[int], Position] | None:
        """The segments up to its own and where they end, if all of that is compacted and no copy asks for it."""
        segments = [one for one in self.log.segments() if one.segment <= self.file.segment]
        upto = max(one.last for one in segments)
        newest = max(one.segment for one in self.log.segments())
        began = oldest_copy_start(self.log) if not self.file.schemas_only else None
        is_needed = newest == self.file.segment or (began is not None and began < upto)
        if is_needed or not is_table(self.root / COMPACTED):
            return None
        is_compacted = upto <= secured_horizon(self.root, self.log.log_id)
        return ([one.segment for one in segments], upto) if is_compacted else None

    def _give_up(self, tables: Sequence[TableSchema]) -> None:
        own = {self.name: self.file.size} if self.table == CHANGES else {}
        lost_before = {(gap.first, gap.last) for gap in lost_ranges.lost_ranges_in(self.log.every_file())}
        if own or (self.file.first, self.file.last) not in lost_before:
            _mark(self.root, _Marks(self.file, tables, own))
        if not own:
            hit("drop_marked")
            self._compactor().give_up(self.name)

    def _keep_from_trimming(self) -> None:
        """A commit that changes nothing refuses the trim that a running reader may be about to make."""
        fenced = FencedTable(self.root / CHANGES)
        fenced.commit([], int(fenced.position or 0), _last(fenced).to_metadata())
        if oldest := LogReader(self.root).oldest:
            raise LogFenced(
                f"changes up to {oldest!s} were trimmed while the command ran", remedy="stop the reader, and try again"
            )

    def _compactor(self) -> CompactedWriter:
        return CompactedWriter(self.root, self.log.log_id)


def position_behind(last: Position) -> Position:
    """Return the first position after the log's end, which no commit or message of the source can have.

    Positions of commits are multiples of ALIGNED, those of messages are one less. Raises LogCorrupt if the log already
    ends just before such a position.
    """
    if int(last) % ALIGNED >= ALIGNED - 2:
        raise LogCorrupt(
            f"the log ends at {last!s}: no position is free between that and the next transaction",
            remedy="start the reader, wait until it has captured a transaction or a heartbeat, stop it, and repeat "
            "the command",
        )
    return Position(last + 1)


def _is_damaged(root: Root, claim: CommitClaim) -> bool:
    place, contents = root / claim.table / claim.name, FileContents()
    try:
        if place.stat().st_size != claim.size:
            return True
        outcome = parquet_check.read(place, contents.add)
    except FileNotFoundError:
        return True
    return bool(outcome.unread) or any(True for _ in contents.faults(claim))


def _relations(file: LogFile) -> set[int] | None:
    """The relations of its rows by that column, None if it cannot be read or is not what was written."""
    try:
        found = read_file(file, Position(0), file.last, ["relation"])["relation"].drop_null().unique().to_pylist()
    except LogCorrupt:
        return None
    return set(found) if not found or (min(found), max(found)) == file.relations else None


@dataclass(frozen=True, slots=True)
class _Marks:
    file: LogFile
    tables: Sequence[TableSchema]
    gone: Mapping[str, int]
    """Files of `changes` that leave, and their bytes."""


def _mark(root: Root, marks: _Marks) -> None:
    """One commit that takes the files out and says at the log's end which tables that leaves behind."""
    fenced = FencedTable(root / CHANGES)
    info = _last(fenced)
    actions: list[AddAction | RemoveAction] = [FencedTable.removed(*file) for file in marks.gone.items()]
    if marks.tables:  # else it held messages alone
        info = replace(info, last=position_behind(info.last), committed_at=time.time_ns() // 1000)
        info = replace(info, rows=len(marks.tables), transactions=1)
        actions.append(_written(fenced, marks.file, _rows(marks, info)))
    removed_files.record_removal(root, CHANGES, marks.gone, fenced.table.version() + 1)
    hit("drop_noted")
    fenced.commit(actions, int(info.last), {**info.to_metadata(), "cdc.dropped": marks.file.path})
    hit("drop_committed")


def _last(fenced: FencedTable) -> CommitInfo:
    found = CommitInfo.from_metadata(fenced.said_last())
    if found is None:
        raise LogCorrupt(f"the latest commit of {CHANGES!r} does not contain the position at which the log ends")
    return found


def _rows(marks: _Marks, info: CommitInfo) -> pa.Table:
    reason = f"rows at {marks.file.first!s} to {marks.file.last!s} were lost with a damaged file of the log"
    return pa.Table.from_batches(
        control_row(
            RowOrder(int(info.last), ordinal, 0, info.committed_at),
            Operation.SCHEMA,
            schema.relation,
            schema.topic,
            _marked(schema, reason).to_json(),
        )
        for ordinal, schema in enumerate(marks.tables)
    )


def _marked(schema: TableSchema, reason: str) -> TableSchema:
    return schema if schema.state is TableState.DROPPED else schema.flagged(TableState.NEEDS_RESYNC, reason)


def _written(fenced: FencedTable, file: LogFile, rows: pa.Table) -> AddAction:
    segment = max(map(int, fenced.files()["partition.segment"].to_pylist()))
    relative = f"segment={segment}/{lost_ranges.lost_range_file_name(file.first, file.last)}"
    size = write_parquet(rows.sort_by(ORDER), fenced.path / relative)
    return fenced.added(relative, size, rows.num_rows, delta_statistics(rows))
