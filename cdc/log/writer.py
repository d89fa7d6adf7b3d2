"""The only writer of `changes`: appends whole transactions in order of position, and trims the oldest segments."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc import atomic_file
from cdc.change import LOG_SCHEMA, Operation
from cdc.errors import LogCorrupt, LogFenced
from cdc.failpoint import hit
from cdc.log import removed_files, torn_commit
from cdc.log.compacted_state import secured_horizon
from cdc.log.fenced_table import TOKEN, FencedTable
from cdc.log.layout import CHANGES, COMPACTED, ORDER, CommitInfo, LogIdentity, delta_statistics, segment_of, trimmed_id
from cdc.log.object_path import Root, as_root
from cdc.log.segments import OpenSegment, SegmentLimits
from cdc.log.storage import encode, write_encoded
from cdc.position import Position


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """Rows as the bytes of a data file."""

    content: list[bytes]
    """In pieces."""
    rows: int
    statistics: str


def encoded(rows: pa.Table) -> list[EncodedFile]:
    """Rows (LOG_SCHEMA) as data files, sorted; asks nothing of the log, so that any thread may do it.

    Schema rows go to a file of their own: readers find them by its statistics.
    """
    rows = rows if rows.schema.equals(LOG_SCHEMA) else rows.cast(LOG_SCHEMA)
    is_schema = pc.equal(rows["op"], Operation.SCHEMA.value)
    parts = [rows.filter(is_schema), rows.filter(pc.invert(is_schema))] if pc.any(is_schema).as_py() else [rows]
    return [_encoded(part) for part in parts if part.num_rows]


def _encoded(rows: pa.Table) -> EncodedFile:
    if pc.count_distinct(rows["relation"], mode="all").as_py() > 1:
        rows = rows.sort_by(ORDER)
    return EncodedFile(encode(rows), rows.num_rows, delta_statistics(rows))


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A data file that is written and synced, and not yet part of the log."""

    path: Root
    relative: str
    segment: int
    rows: int
    size: int
    statistics: str


class LogWriter:
    """Appends to one log; one process, one thread."""

    def __init__(self, root: str | Root, limits: SegmentLimits) -> None:
        """Raises LogUnwritable if what the log holds cannot be made durable."""
        root = as_root(root)
        self._log = root
        self._root = root / CHANGES
        self._limits = limits
        self._fenced = FencedTable(self._root)
        self.identity = self._fenced.identity
        self.log_id = self._fenced.log_id
        self._segment = OpenSegment(number=self._last_segment(), opened_at=time.monotonic())
        self._synced: int | None = None

    @classmethod
    def open(cls, root: str | Root, identity: LogIdentity, limits: SegmentLimits) -> Self:
        """The writer of the log under root, which is made if there is none."""
        torn_commit.repair_torn_commit(
            as_root(root) / COMPACTED
        )  # else nobody could read the log before it is compacted again
        FencedTable.create(as_root(root) / CHANGES, identity)
        return cls(root, limits)

    @property
    def durable(self) -> Position | None:
        """The last position in the log; None while it holds no snapshot."""
        position = self._fenced.position
        return None if position is None else Position(position)

    @property
    def last_commit(self) -> CommitInfo | None:
        """What the latest commit says of itself."""
        return CommitInfo.from_metadata(self._fenced.said_last())

    def stage(self, rows: pa.Table) -> list[StagedFile]:
        """Encode rows and write them, as stage_encoded does."""
        return self.stage_encoded(encoded(rows))

    def stage_encoded(self, files: Sequence[EncodedFile]) -> list[StagedFile]:
        """Write data files, synced to disk; nothing is visible yet."""
        made: list[StagedFile] = []
        try:
            made.extend(map(self._write, files))
        except BaseException:
            for written in made:
                written.path.unlink(missing_ok=True)
            raise
        return made

    @property
    def tokens(self) -> frozenset[str | None]:
        """What tells the commit that it stands on, and the one that it last tried to make, from all others."""
        return self._fenced.tokens

    @property
    def last_token(self) -> str | None:
        """What tells the latest commit from every other attempt at one; None if it does not say."""
        return self._fenced.said_last().get(TOKEN)

    def commit(self, files: Sequence[StagedFile], info: CommitInfo, token: str | None = None) -> None:
        """Make files part of the log in one commit that ends at info.last; durable when it returns.

        token: to recognise the commit by when its answer is lost. Raises LogFenced if another writer committed,
        LogCorrupt if a file is not as it was written.
        """
        if self.durable is not None and info.last <= self.durable:
            raise LogFenced(
                f"position would not advance: the log is at {self.durable!s}, the commit ends at {info.last!s}"
            )
        self._fenced.check_ours()
        actions = [self._fenced.added(file.relative, file.size, file.rows, file.statistics) for file in files]
        said = info.to_metadata() if token is None else {**info.to_metadata(), TOKEN: token}
        self._fenced.commit(actions, info.last, said)

    def trim(self, segments: Collection[int], upto: Position) -> None:
        """Take whole segments out in one commit, so that `changes` holds single changes above `upto` alone.

        For a caller that has nothing staged; what is in them must be compacted. Positions stay, and the files stay on
        the disk. Segments that are gone already are no error. Raises LogFenced if another writer committed,
        LogCorrupt if a segment reaches beyond `upto` or is the newest one.
        """
        last = self.last_commit
        self._fenced.check_ours()
        listed = self._fenced.files().select(["path", "size_bytes", "max.position", "partition.segment"]).to_pylist()
        chosen = [row for row in listed if int(row["partition.segment"]) in set(segments)]
        newest = max((int(row["partition.segment"]) for row in listed), default=0)
        if last is None or any(row["max.position"] > upto for row in chosen) or newest in segments:
            raise LogCorrupt(
                f"segments {sorted(segments)!r} cannot be trimmed up to {upto!s}: they contain later positions"
            )
        if not chosen:
            return
        if (horizon := secured_horizon(self._log, self.log_id)) < upto:
            raise LogCorrupt(f"changes up to {upto!s} cannot be trimmed: the log is compacted only up to {horizon!s}")
        sizes = {row["path"]: row["size_bytes"] for row in chosen}
        removed_files.record_removal(self._log, CHANGES, sizes, self._fenced.table.version() + 1)
        hit("trim_noted")
        self._fenced.commit(
            [FencedTable.removed(row["path"], row["size_bytes"]) for row in chosen],
            last.last,
            {**last.to_metadata(), "cdc.trimmed": str(upto)},
            {trimmed_id(self.log_id): int(upto)},
        )
        hit("trim_committed")

    def rewrite(self, made: Sequence[StagedFile], gone: Sequence[str]) -> bool:
        """Put files in the place of others (paths relative to the table) that hold the same rows, in one commit.

        For a caller that has nothing staged. False, with nothing done, if one of the others has left the table
        meanwhile; they stay on the disk. Raises LogFenced if another writer committed, LogCorrupt if a file is not as
        it was written or the rows are not as many.
        """
        last = self.last_commit
        self._fenced.check_ours()
        listed = self._fenced.files().select(["path", "size_bytes", "num_records"]).to_pylist()
        held = {row["path"]: row for row in listed}
        if all(file.relative in held for file in made):
            return True  # an attempt of which nothing was heard
        if last is None or not held.keys() >= set(gone):
            return False
        rows = sum(held[path]["num_records"] for path in gone)
        if rows != sum(file.rows for file in made):
            raise LogCorrupt(
                f"{len(gone)} files with {rows} rows cannot be replaced: the new files have another number of rows"
            )
        added = [
            replace(self._fenced.added(file.relative, file.size, file.rows, file.statistics), data_change=False)
            for file in made
        ]
        sizes = {path: held[path]["size_bytes"] for path in gone}
        removed_files.record_removal(self._log, CHANGES, sizes, self._fenced.table.version() + 1)
        hit("rewrite_noted")
        removed = [FencedTable.removed(path, held[path]["size_bytes"], data_change=False) for path in gone]
        self._fenced.commit([*added, *removed], last.last, {**last.to_metadata(), "cdc.rewritten": str(len(gone))})
        hit("rewrite_committed")
        return True

    def _write(self, file: EncodedFile) -> StagedFile:
        self._segment = self._segment.rolled(self._limits, time.monotonic())
        relative = f"segment={self._segment.number}/{uuid.uuid4().hex}.parquet"
        path, size = self._root / relative, sum(map(len, file.content))
        self._make(path.parent)
        write_encoded(file.content, path)
        self._segment = self._segment.grown(size)
        return StagedFile(path, relative, self._segment.number, file.rows, size, file.statistics)

    def _make(self, folder: Root) -> None:
        """Let a segment's directory be there after a power loss too; who made it may not have lived to sync that."""
        if self._synced == segment_of(folder.name):
            return
        folder.mkdir(exist_ok=True)
        atomic_file.sync(folder.parent)
        self._synced = segment_of(folder.name)

    def _last_segment(self) -> int:
        numbers = self._fenced.files()["partition.segment"]
        return int(pc.max(numbers).as_py()) + 1 if len(numbers) else 0
