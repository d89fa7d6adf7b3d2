"""Rewrite of many small log files into a few large ones with the same rows, while the reader runs.

Every commit, checkpoint and listing costs time for each file of the table, and every reader opens each file. Therefore
the new files of the open segment, which is the newest one, are merged as soon as there are many. After a segment is
closed, its files are merged once more. So a row is rewritten at most twice.

A background thread writes the new files. The append thread commits the replacement of the old files between two
appends.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from cdc.bucket_files import Root, as_root
from cdc.errors import LogCorrupt
from cdc.log import lost_range_records
from cdc.log.disk_format import CHANGES, GROUP, ORDER, SMALL_GROUP, LogFile, delta_statistics
from cdc.log.reader import LogReader, read_file
from cdc.log.table_io import write_parquet
from cdc.log.writer import StagedFile
from cdc.position import Position

OPEN_PREFIX: Final = "gathered-"
"""Prefix of the names of files that were merged while their segment was open."""
CLOSED_PREFIX: Final = "settled-"
"""Prefix of the names of files that were merged after their segment was closed."""
OPEN_MIN_FILES: Final = 256
"""Minimum number of files by which a merge must reduce the open segment; each file costs 10 µs per commit."""
CLOSED_MIN_SAVING: Final = 8
"""Minimum number of files by which a merge must reduce a closed segment."""
SMALL_BYTES: Final = 4 << 20
"""Size in bytes below which a file is small; larger files are never rewritten."""
SMALL_BYTES_ONE_TABLE: Final = 1 << 20
"""Size in bytes below which a file with rows of only one table is small.

A copy writes such files, and readers of other tables skip them. To rewrite them all would cost as much as the copy.
"""
MEMORY_BYTES: Final = 56 << 20
"""Size in bytes of the Arrow rows that become one file; the peak memory is about three times as much."""

log = structlog.get_logger("settled")


@dataclass(frozen=True, slots=True)
class RewriteJob:
    """A plan to merge small files of one segment."""

    segment: int
    prefix: str
    """Prefix of the names of the new files: OPEN_PREFIX or CLOSED_PREFIX."""
    groups: tuple[tuple[LogFile, ...], ...]
    """Groups of small files. The files of one group follow each other in the log, and become one or more new files."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite that is written but not committed: the new files, and the old files with the same rows."""

    new: tuple[StagedFile, ...]
    old: tuple[str, ...]
    """Paths of the old files relative to the table's directory."""


class RewritingWriter(Protocol):
    """A writer of the log that can replace small files by merged files."""

    def rewrite(self, new: Sequence[StagedFile], old: Sequence[str]) -> bool:
        """Replace files as `LogWriter.rewrite` does."""


def plan_rewrite(
    files: Sequence[LogFile], excluded: Collection[int] = (), min_open: int = OPEN_MIN_FILES
) -> RewriteJob | None:
    """Return the job for the oldest segment of `changes` that has enough small files; None if there is no such segment.

    Segments in `excluded` are skipped. `min_open` is the number of files by which a merge must reduce the open segment.
    """
    newest = max((file.segment for file in files), default=0)
    segments: dict[int, list[LogFile]] = {}
    for file in files:
        segments.setdefault(file.segment, []).append(file)
    for number in sorted(segments.keys() - set(excluded)):
        is_open = number == newest
        groups = tuple(_groups(segments[number], is_open=is_open))
        if sum(map(len, groups)) - len(groups) >= (min_open if is_open else CLOSED_MIN_SAVING):
            return RewriteJob(number, OPEN_PREFIX if is_open else CLOSED_PREFIX, groups)
    return None


def _groups(files: Sequence[LogFile], *, is_open: bool) -> Iterator[tuple[LogFile, ...]]:
    """Yield groups of small files of one segment that follow each other in the log.

    Files with only `s` rows are grouped separately.
    """
    # the name of a file may record a lost range
    finished = (lost_range_records.PREFIX, CLOSED_PREFIX, *((OPEN_PREFIX,) if is_open else ()))
    for schemas in (True, False):
        group: list[LogFile] = []
        for file in sorted(files, key=attrgetter("first", "last", "path")):
            if file.schemas_only is not schemas:
                continue
            if _is_small(file) and not _name(file).startswith(finished):
                group.append(file)
                continue
            if len(group) > 1:
                yield tuple(group)
            group = []
        if len(group) > 1:
            yield tuple(group)


def _is_small(file: LogFile) -> bool:
    one_table = file.relations is not None and file.relations[0] == file.relations[1]
    return file.size < (SMALL_BYTES_ONE_TABLE if one_table else SMALL_BYTES)


def rewrite_files(
    root: Root, job: RewriteJob, stopped: Callable[[], bool], memory: int = MEMORY_BYTES
) -> Rewrite | None:
    """Write and sync the new files of `job` without committing them; return None as soon as `stopped` returns True.

    A new file is started when the collected rows reach `memory` bytes. Raises LogCorrupt if an old file cannot be read
    or has another number of rows than its commit records. After an error or a stop no new file remains.
    """
    new: list[StagedFile] = []
    try:
        new.extend(_write(root, job, rows) for rows in _parts(job, stopped, memory))
    except BaseException as exc:
        for file in new:
            file.path.unlink(missing_ok=True)
        if isinstance(exc, _Stopped):
            return None
        raise
    return Rewrite(tuple(new), tuple(f"segment={job.segment}/{_name(file)}" for group in job.groups for file in group))


class _Stopped(Exception):
    """Raised if the function `stopped` returns True during a rewrite."""


def _parts(job: RewriteJob, stopped: Callable[[], bool], memory: int) -> Iterator[pa.Table]:
    """Yield the rows of each new file; raise _Stopped if `stopped` returns True."""
    for group in job.groups:
        rows: list[pa.Table] = []
        size = 0
        for file in group:
            if stopped():
                raise _Stopped
            rows.append(_read_all(file))
            size += rows[-1].nbytes
            if size >= memory:
                yield _join(rows)
                size = 0
        if rows:
            yield _join(rows)


def _join(rows: list[pa.Table]) -> pa.Table:
    """Concatenate the tables into one chunk, and empty the list, so that the rows are not in memory twice."""
    joined = pa.concat_tables(rows).combine_chunks()
    rows.clear()
    return joined


def _read_all(file: LogFile) -> pa.Table:
    rows = read_file(file, Position(0), file.last)
    if rows.num_rows != file.rows:
        raise LogCorrupt(f"log file {file.path!r} contains {rows.num_rows} rows, but its commit records {file.rows}")
    return rows


def _write(root: Root, job: RewriteJob, rows: pa.Table) -> StagedFile:
    order = pc.sort_indices(rows, sort_keys=ORDER)
    has_many_tables = pc.count_distinct(rows["relation"]).as_py() > rows.num_rows / GROUP
    relative = f"segment={job.segment}/{job.prefix}{uuid.uuid4().hex}.parquet"
    path = root / CHANGES / relative
    size = write_parquet(rows, path, order, SMALL_GROUP if has_many_tables else GROUP)
    return StagedFile(path, relative, job.segment, rows.num_rows, size, delta_statistics(rows))


def _name(file: LogFile) -> str:
    return file.path.rpartition("/")[2]


class SmallFileRewriter:
    """Merges small files of `changes`: a background thread prepares a rewrite, and the append thread commits it."""

    def __init__(self, root: str | Root, stopped: Callable[[], bool], min_open: int = OPEN_MIN_FILES) -> None:
        """`stopped` is called before each file is read; if it returns True, the rewrite is abandoned.

        `min_open` is the number of files by which a merge must reduce the open segment.
        """
        self._root, self._stopped, self._min_open = as_root(root), stopped, min_open
        self._view: LogReader | None = None
        self._prepared: Rewrite | None = None
        self._failed_segments: set[int] = set()

    def prepare(self, excluded: Collection[int] = ()) -> bool:
        """Write the new files of the next rewrite unless a rewrite is already prepared.

        Return True if a rewrite is ready for `commit_prepared`. Only the background thread may call this method.
        Segments in `excluded` are skipped. A segment with a damaged file is logged once, and skipped until the process
        restarts.
        """
        if self._prepared is not None:
            return True
        if self._view is None:
            self._view = LogReader(self._root)
        self._view.refresh()
        job = plan_rewrite(self._view.every_file(), {*excluded, *self._failed_segments}, self._min_open)
        if job is None:
            return False
        try:
            self._prepared = rewrite_files(self._root, job, self._stopped)
        except LogCorrupt as exc:
            self._failed_segments.add(job.segment)
            log.warning(
                "cannot merge the small files of a log segment, because one of them is damaged: the segment stays as "
                "it is until the reader restarts; run 'cdc log verify'",
                segment=job.segment,
                code=exc.code,
                message=exc.message,
            )
        return self._prepared is not None

    def commit_prepared(self, writer: RewritingWriter) -> bool:
        """Commit the prepared rewrite; return True if it was committed, False if none is prepared or the commit failed.

        A rewrite that cannot be committed is discarded. Only the append thread may call this method, and only while all
        files that it wrote are committed.
        """
        rewrite = self._prepared
        if rewrite is None:
            return False
        try:
            is_committed = writer.rewrite(rewrite.new, rewrite.old)
        except LogCorrupt as exc:  # one of the new files was deleted
            log.warning(
                "cannot replace small files of the log by merged files: the small files stay until the next merge",
                code=exc.code,
                message=exc.message,
            )
            is_committed = False
        finally:
            self._prepared = None
        if is_committed:
            log.info("merged small files of the log", files=len(rewrite.old), into=len(rewrite.new))
        return is_committed
