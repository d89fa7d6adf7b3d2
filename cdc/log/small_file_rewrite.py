"""Rewrite of many small log files into a few large ones with the same rows, while the reader runs.

Every commit, checkpoint and look pays for each file that is listed, and every reader for each that it opens. So new
files of the segment that is written to are gathered once there are many, and a segment that nobody writes to any more
is settled: a row is written again at most twice, and then never. The rows are written beside the thread that commits;
that one only puts the new files in the place of the old, between two appends.
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

from cdc.errors import LogCorrupt
from cdc.log import lost_ranges
from cdc.log.layout import CHANGES, GROUP, ORDER, SMALL_GROUP, LogFile, delta_statistics
from cdc.log.object_path import Root, as_root
from cdc.log.reader import LogReader, read_file
from cdc.log.storage import write_parquet
from cdc.log.writer import StagedFile
from cdc.position import Position

GATHERED: Final = "gathered-"
"""How a file begins that was made of new ones of an open segment."""
SETTLED: Final = "settled-"
"""How a file begins that was made in a closed segment."""
MANY: Final = 256
"""New files of an open segment that are worth it; a commit takes some 10 µs longer for each that is listed."""
FEW: Final = 8
"""By how many files a closed segment has to become shorter."""
SMALL: Final = 4 << 20
"""Bytes below which a file is small; what is larger stays as it is."""
ALONE: Final = 1 << 20
"""The same for rows of one table, as a copy brings them: nobody who wants another reads them, and to write all of a
copy once more costs as much as the copy."""
MEMORY: Final = 56 << 20
"""Bytes of rows, as Arrow, that become one file; about three times as much is in memory meanwhile."""

log = structlog.get_logger("settled")


@dataclass(frozen=True, slots=True)
class RewriteJob:
    """Files of one segment that are worth becoming fewer."""

    segment: int
    prefix: str
    """GATHERED or SETTLED."""
    groups: tuple[tuple[LogFile, ...], ...]
    """Neighbours in the order of the log; no two groups share a file of the new ones."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """New files and the old ones, relative to the table's directory, whose rows they hold."""

    made: tuple[StagedFile, ...]
    gone: tuple[str, ...]


class Rewrites(Protocol):
    """The writer, as far as this goes."""

    def rewrite(self, made: Sequence[StagedFile], gone: Sequence[str]) -> bool:
        """As LogWriter.rewrite."""


def plan_rewrite(files: Sequence[LogFile], spared: Collection[int] = (), many: int = MANY) -> RewriteJob | None:
    """Choose the oldest segment of `changes` whose small files are worth rewriting; spared: segments to leave alone."""
    newest = max((file.segment for file in files), default=0)
    segments: dict[int, list[LogFile]] = {}
    for file in files:
        segments.setdefault(file.segment, []).append(file)
    for number in sorted(segments.keys() - set(spared)):
        is_open = number == newest
        groups = tuple(_groups(segments[number], is_open=is_open))
        if sum(map(len, groups)) - len(groups) >= (many if is_open else FEW):
            return RewriteJob(number, GATHERED if is_open else SETTLED, groups)
    return None


def _groups(files: Sequence[LogFile], *, is_open: bool) -> Iterator[tuple[LogFile, ...]]:
    """Neighbours that may become one; schema rows have files of their own before and after."""
    finished = (lost_ranges.PREFIX, SETTLED, *((GATHERED,) if is_open else ()))  # of lost rows a name tells
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
    alone = file.relations is not None and file.relations[0] == file.relations[1]
    return file.size < (ALONE if alone else SMALL)


def rewrite_files(root: Root, job: RewriteJob, stopped: Callable[[], bool], memory: int = MEMORY) -> Rewrite | None:
    """Write the new files, of which the log knows nothing yet, synced to disk; None once it is to stop.

    memory: bytes of rows from which on they become a file. Raises LogCorrupt if an old file cannot be read or is not as
    the log says; then, and when it is to stop, nothing stays on the disk.
    """
    made: list[StagedFile] = []
    try:
        made.extend(_written(root, job, rows) for rows in _parts(job, stopped, memory))
    except BaseException as exc:
        for file in made:
            file.path.unlink(missing_ok=True)
        if isinstance(exc, _Stopped):
            return None
        raise
    return Rewrite(tuple(made), tuple(f"segment={job.segment}/{_name(file)}" for group in job.groups for file in group))


class _Stopped(Exception):
    """Nobody waits for the files any more."""


def _parts(job: RewriteJob, stopped: Callable[[], bool], memory: int) -> Iterator[pa.Table]:
    """The rows of each new file."""
    for group in job.groups:
        rows: list[pa.Table] = []
        size = 0
        for file in group:
            if stopped():
                raise _Stopped
            rows.append(_whole(file))
            size += rows[-1].nbytes
            if size >= memory:
                yield _joined(rows)
                size = 0
        if rows:
            yield _joined(rows)


def _joined(rows: list[pa.Table]) -> pa.Table:
    """The rows as one piece of memory, and not a second time in the list."""
    joined = pa.concat_tables(rows).combine_chunks()
    rows.clear()
    return joined


def _whole(file: LogFile) -> pa.Table:
    rows = read_file(file, Position(0), file.last)
    if rows.num_rows != file.rows:
        raise LogCorrupt(f"log file {file.path!r} contains {rows.num_rows} rows: expected {file.rows}")
    return rows


def _written(root: Root, job: RewriteJob, rows: pa.Table) -> StagedFile:
    order = pc.sort_indices(rows, sort_keys=ORDER)
    many = pc.count_distinct(rows["relation"]).as_py() > rows.num_rows / GROUP
    relative = f"segment={job.segment}/{job.prefix}{uuid.uuid4().hex}.parquet"
    path = root / CHANGES / relative
    size = write_parquet(rows, path, order, SMALL_GROUP if many else GROUP)
    return StagedFile(path, relative, job.segment, rows.num_rows, size, delta_statistics(rows))


def _name(file: LogFile) -> str:
    return file.path.rpartition("/")[2]


class SmallFileRewriter:
    """Looks for such files beside a writer, writes the new ones, and lets the committing thread put them in place."""

    def __init__(self, root: str | Root, stopped: Callable[[], bool], many: int = MANY) -> None:
        """stopped: asked between two files that are read. many: new files of the open segment that are worth it."""
        self._root, self._stopped, self._many = as_root(root), stopped, many
        self._view: LogReader | None = None
        self._offered: Rewrite | None = None
        self._refused: set[int] = set()

    def look(self, spared: Collection[int] = ()) -> bool:
        """Write what is due now, once what was offered has been carried out; whether there is something to commit.

        For a thread beside. A segment with a file that cannot be read is told once and left alone from then on.
        """
        if self._offered is not None:
            return True
        if self._view is None:
            self._view = LogReader(self._root)
        self._view.refresh()
        job = plan_rewrite(self._view.every_file(), {*spared, *self._refused}, self._many)
        if job is None:
            return False
        try:
            self._offered = rewrite_files(self._root, job, self._stopped)
        except LogCorrupt as exc:
            self._refused.add(job.segment)
            log.warning("a segment keeps its small files", segment=job.segment, code=exc.code, message=exc.message)
        return self._offered is not None

    def carry_out(self, writer: Rewrites) -> bool:
        """Put in place what was written; for the committing thread, while it has nothing staged."""
        rewrite = self._offered
        if rewrite is None:
            return False
        try:
            done = writer.rewrite(rewrite.made, rewrite.gone)
        except LogCorrupt as exc:  # somebody has taken one of them away meanwhile
            log.warning("small files stay", code=exc.code, message=exc.message)
            done = False
        finally:
            self._offered = None
        if done:
            log.info("rewritten", files=len(rewrite.gone), into=len(rewrite.made))
        return done
