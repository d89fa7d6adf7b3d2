"""The only writer of `changes`: it appends whole transactions in order of position, and trims the oldest segments.

A segment is a partition of the table. A new segment begins when the current one reaches a size or an age, so that
retention can remove whole partitions without rewriting a file.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc import atomic_file
from cdc.bucket_files import Root, as_root
from cdc.errors import LogCorrupt, LogFenced
from cdc.failpoint import hit
from cdc.log import retired_files
from cdc.log.compacted_table import secured_horizon
from cdc.log.disk_format import (
    CHANGES,
    COMPACTED,
    ORDER,
    CommitInfo,
    LogIdentity,
    delta_statistics,
    segment_of,
    trimmed_id,
)
from cdc.log.fenced_table import TOKEN, FencedTable, repair_torn_commit
from cdc.log.table_io import encode, write_encoded
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.position import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLimits:
    """Size and age at which a segment is full, so that the next file begins a new segment."""

    size: int
    """Total size of the segment's data files in bytes."""
    age: float
    """Seconds since the segment's first file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSegment:
    """The segment to which new files are added."""

    number: int
    size: int = 0
    opened_at: float
    """Time at which the segment began, in seconds on the caller's clock."""

    def rolled(self, limits: SegmentLimits, now: float) -> Self:
        """Return the next segment if this segment is full, otherwise this segment; an empty segment is never full."""
        if self.size and (self.size >= limits.size or now - self.opened_at >= limits.age):
            return replace(self, number=self.number + 1, size=0, opened_at=now)
        return self

    def grown(self, size: int) -> Self:
        """Return this segment after a file of `size` bytes was added."""
        return replace(self, size=self.size + size)


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """The content of a data file that is encoded but not yet written."""

    content: memoryview
    rows: int
    statistics: str


_SMALL_CHUNK: Final = 1 << 20
"""Average bytes of a chunk below which the chunks are combined before rows are filtered and sorted.

Arrow needs some µs for each chunk of each column: 0.7 s for 50,000 rows of 1,000 tables, and 0.1 s once combined.
"""


def encode_files(rows: pa.Table) -> list[EncodedFile]:
    """Sort and encode rows of LOG_SCHEMA, and return the content of one or two data files.

    The `s` rows get a file of their own, so that readers find them by the file statistics. The function reads nothing
    from the log, so any thread may call it.
    """
    rows = rows if rows.schema.equals(LOG_SCHEMA) else rows.cast(LOG_SCHEMA)
    if rows.nbytes < _SMALL_CHUNK * rows["op"].num_chunks:
        rows = rows.combine_chunks()
    is_schema = pc.equal(rows["op"], Operation.SCHEMA.value)
    parts = [rows.filter(is_schema), rows.filter(pc.invert(is_schema))] if pc.any(is_schema).as_py() else [rows]
    return [_encode_file(part) for part in parts if part.num_rows]


def _encode_file(rows: pa.Table) -> EncodedFile:
    if pc.count_distinct(rows["relation"], mode="all").as_py() > 1:
        rows = rows.sort_by(ORDER)
    return EncodedFile(encode(rows), rows.num_rows, delta_statistics(rows))


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A data file that is written and synced but not yet committed."""

    path: Root
    relative: str
    segment: int
    rows: int
    size: int
    statistics: str


class LogWriter:
    """Writer of the table `changes` of one log, for one thread of one process."""

    def __init__(self, root: str | Root, limits: SegmentLimits) -> None:
        """Open the log for writing; raises LogUnwritable if its latest commit cannot be made durable."""
        root = as_root(root)
        self._log = root
        self._root = root / CHANGES
        self._limits = limits
        self._fenced = FencedTable(self._root)
        self.identity = self._fenced.identity
        self.log_id = self._fenced.log_id
        self._segment = OpenSegment(number=self._last_segment(), opened_at=time.monotonic())
        self._synced_segment: int | None = None

    @classmethod
    def open(cls, root: str | Root, identity: LogIdentity, limits: SegmentLimits) -> Self:
        """Return a writer for the log under `root`; the log is created if it does not exist."""
        repair_torn_commit(as_root(root) / COMPACTED)  # else nobody could read the log before it is compacted again
        FencedTable.create(as_root(root) / CHANGES, identity)
        return cls(root, limits)

    @property
    def durable(self) -> Position | None:
        """Last position in the log; None before the initial snapshot."""
        position = self._fenced.position
        return None if position is None else Position(position)

    @property
    def last_commit(self) -> CommitInfo | None:
        """Metadata of the latest commit of `changes`; None before the initial snapshot."""
        return CommitInfo.from_metadata(self._fenced.latest_commit_info())

    def stage(self, rows: pa.Table) -> list[StagedFile]:
        """Encode rows, and write the files as `stage_encoded` does."""
        return self.stage_encoded(encode_files(rows))

    def stage_encoded(self, files: Sequence[EncodedFile]) -> list[StagedFile]:
        """Write and sync data files; readers see them after the commit. If a write fails, no file remains."""
        staged: list[StagedFile] = []
        try:
            staged.extend(map(self._write, files))
        except BaseException:
            for file in staged:
                file.path.unlink(missing_ok=True)
            raise
        return staged

    @property
    def tokens(self) -> frozenset[str | None]:
        """Tokens of the last successful commit and of the last attempted commit of this writer."""
        return self._fenced.tokens

    @property
    def last_token(self) -> str | None:
        """Token of the latest commit in the log; None if that commit has no token."""
        return self._fenced.latest_commit_info().get(TOKEN)

    def commit(self, files: Sequence[StagedFile], info: CommitInfo, token: str | None = None) -> None:
        """Add the staged files to the log in one commit that ends at `info.last`.

        The commit is durable when the method returns. `token` identifies the commit if the response is lost. Raises
        LogFenced if another writer has committed, LogCorrupt if a file differs from what was written.
        """
        if self.durable is not None and info.last <= self.durable:
            raise LogFenced(
                f"a commit that ends at {info.last!s} is refused: the log is already at {self.durable!s}, so its "
                "position would not advance"
            )
        actions = [self._fenced.added(file.relative, file.size, file.rows, file.statistics) for file in files]
        metadata = info.to_metadata() if token is None else {**info.to_metadata(), TOKEN: token}
        self._fenced.commit(actions, info.last, metadata)

    def trim(self, segments: Collection[int], upto: Position) -> None:
        """Remove whole segments in one commit, so that `changes` contains only the changes above `upto`.

        The caller must have no uncommitted files, and the segments must be compacted. Segments that are already removed
        are no error. The durable position does not change, and the files stay on disk. Raises LogFenced if another
        writer has committed. Raises LogCorrupt if a segment ends above `upto`, is not compacted, or is the newest
        segment.
        """
        last = self.last_commit
        listed = self._fenced.files().select(["path", "size_bytes", "max.position", "partition.segment"]).to_pylist()
        chosen = [row for row in listed if int(row["partition.segment"]) in set(segments)]
        newest = max((int(row["partition.segment"]) for row in listed), default=0)
        if newest in segments:
            raise LogCorrupt(f"segment {newest} of the log cannot be trimmed: it is the newest segment")
        if last is None or any(row["max.position"] > upto for row in chosen):
            raise LogCorrupt(
                f"segments {sorted(segments)!r} of the log cannot be trimmed: they contain positions after {upto!s}"
            )
        if not chosen:
            return
        if (horizon := secured_horizon(self._log, self.log_id)) < upto:
            raise LogCorrupt(f"changes up to {upto!s} cannot be trimmed: the log is compacted only up to {horizon!s}")
        sizes = {row["path"]: row["size_bytes"] for row in chosen}
        retired_files.record_removal(self._log, CHANGES, sizes, self._fenced.next_version)
        hit("trim_noted")
        self._fenced.commit(
            [FencedTable.removed(row["path"], row["size_bytes"]) for row in chosen],
            last.last,
            {**last.to_metadata(), "cdc.trimmed": str(upto)},
            {trimmed_id(self.log_id): int(upto)},
        )
        hit("trim_committed")

    def rewrite(self, new: Sequence[StagedFile], old: Sequence[str]) -> bool:
        """Replace old files (paths relative to the table) by new files with the same rows, in one commit.

        The caller must have no uncommitted files except `new`. The old files stay on disk. Return False, and do
        nothing, if an old file is no longer in the table. Raises LogFenced if another writer has committed. Raises
        LogCorrupt if a new file differs from what was written, or if new and old files differ in their number of rows.
        """
        last = self.last_commit
        rows_of_files = self._fenced.files().select(["path", "size_bytes", "num_records"]).to_pylist()
        listed = {row["path"]: row for row in rows_of_files}
        if all(file.relative in listed for file in new):
            return True  # an earlier attempt succeeded, and its response was lost
        if last is None or not listed.keys() >= set(old):
            return False
        rows = sum(listed[path]["num_records"] for path in old)
        if rows != sum(file.rows for file in new):
            raise LogCorrupt(
                f"{len(old)} files of the log with {rows} rows cannot be replaced: the new files have another "
                "number of rows"
            )
        added = [
            self._fenced.added(file.relative, file.size, file.rows, file.statistics, data_change=False) for file in new
        ]
        sizes = {path: listed[path]["size_bytes"] for path in old}
        retired_files.record_removal(self._log, CHANGES, sizes, self._fenced.next_version)
        hit("rewrite_noted")
        removed = [FencedTable.removed(path, listed[path]["size_bytes"], data_change=False) for path in old]
        self._fenced.commit([*added, *removed], last.last, {**last.to_metadata(), "cdc.rewritten": str(len(old))})
        hit("rewrite_committed")
        return True

    def _write(self, file: EncodedFile) -> StagedFile:
        self._segment = self._segment.rolled(self._limits, time.monotonic())
        relative = f"segment={self._segment.number}/{uuid.uuid4().hex}.parquet"
        path, size = self._root / relative, len(file.content)
        self._make_folder(path.parent)
        write_encoded(file.content, path)
        self._segment = self._segment.grown(size)
        return StagedFile(path, relative, self._segment.number, file.rows, size, file.statistics)

    def _make_folder(self, folder: Root) -> None:
        """Create a segment's directory durably.

        The method also syncs an existing directory, because its creator may have been killed before the sync.
        """
        if self._synced_segment == segment_of(folder.name):
            return
        folder.mkdir(exist_ok=True)
        atomic_file.sync(folder.parent)
        self._synced_segment = segment_of(folder.name)

    def _last_segment(self) -> int:
        numbers = self._fenced.files()["partition.segment"]
        return int(pc.max(numbers).as_py()) + 1 if len(numbers) else 0
