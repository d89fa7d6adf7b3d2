"""Vacuum: deletes data files that no reader of the log needs any more.

There are three kinds of such files:

- **Removed files**: a trim, compaction or rewrite removed them from a table. Their records (`retired_files.py`)
  keep them for the grace period, and longer for a consumer that has pinned an older version.
- **Orphan files**: no commit and no record names them. An orphan file is deleted if it is older than the latest
  commit of its table, by more than the grace period and by more than ten minutes. A younger file may be a staged one
  that waits for its commit.
- **Staged files** that a killed writer never committed. The next writer deletes them when it starts. First it makes a
  commit, so that the killed writer could no longer commit these files if it still ran.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from cdc.boot_clock import SECOND, BootTimestamp
from cdc.bucket_files import Root, as_root
from cdc.log import consumers, retired_files
from cdc.log.disk_format import CHANGES, COMPACTED, CommitInfo
from cdc.log.fenced_table import FencedTable
from cdc.log.retired_files import RemovedFiles
from cdc.log.table_io import add_actions, is_table, last_commit_info, open_table
from cdc.log.table_view import LogTableView
from cdc.log.trim_plan import Retention

MIN_ORPHAN_AGE: Final = 600.0
"""Minimum age of an orphan file in seconds, even if the grace period is shorter.

A rewrite takes some minutes at most, and its files look like orphan files until its commit.
"""
_SEGMENT: Final = re.compile(r"segment=\d+\Z")
_SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class VacuumResult:
    """Number and total size of the deleted files, or of the files that a dry run would delete."""

    files: int = 0
    size: int = 0
    """Total size of the files in bytes."""


@dataclass(frozen=True, slots=True)
class OrphanFile:
    """A data file that no commit and no record of removed files names."""

    name: str
    """Path of the file relative to the log's root."""
    size: int
    """Size of the file in bytes."""


def vacuum(root: str | Root, retention: Retention, *, dry_run: bool = False) -> VacuumResult:
    """Delete the removed files whose grace period is over, except those that a consumer has pinned.

    Several processes may call this function at the same time. The grace period of a file starts at the first vacuum
    after its removal. A dry run only counts the files.
    """
    root, now = as_root(root), BootTimestamp.now()
    # the records are read before the tables: a commit in between is then seen as committed
    records = retired_files.list_removals(root)
    current = {table: _current_paths(root / table) for table in {record.table for record in records.values()}}
    if not dry_run:
        records = {path: _start_grace(path, record, current, now) for path, record in records.items()}
    pinned = _pinned(root, now, int(retention.max_age * SECOND)) if records else None
    chosen = deletable(records.values(), current, pinned=pinned, grace=retention.grace, now=now)
    files = size = 0
    for path, record in records.items():
        if record in chosen:
            for name in record.paths:
                deleted = _delete(root / record.table / name, dry_run=dry_run)
                files, size = files + (deleted is not None), size + (deleted or 0)
            if not dry_run:
                path.unlink(missing_ok=True)
    return VacuumResult(files, size)


def waiting(root: str | Root) -> int:
    """Return the total size in bytes of the removed files that are still on disk, as their records say."""
    return sum(record.size for record in retired_files.list_removals(root).values())


def deletable(
    records: Iterable[RemovedFiles],
    current: Mapping[str, Collection[str]],
    *,
    pinned: int | None,
    grace: float,
    now: BootTimestamp,
) -> list[RemovedFiles]:
    """Return the records whose removed files may be deleted now.

    `current` maps each table to the paths in its current version. `pinned` is the lowest version of `compacted` that a
    consumer reads. `grace` is in seconds; the grace period of a record starts when a vacuum first finds that its files
    have left the table.
    """
    records = list(records)
    # a killed or fenced writer leaves a record with an earlier version than the commit that really removed the files
    removed_in: dict[tuple[str, str], int] = {}
    for record in sorted(records, key=attrgetter("version")):
        removed_in |= {(record.table, path): record.version for path in record.paths}
    return [
        record
        for record in records
        if is_committed(record, current)
        and record.age_us(now) >= int(grace * SECOND)
        and not (
            record.table == COMPACTED
            and pinned is not None
            and any(pinned < removed_in[record.table, path] for path in record.paths)
        )
    ]


def is_committed(record: RemovedFiles, current: Mapping[str, Collection[str]]) -> bool:
    """Return True if the commit that `record` announces was made: its table no longer contains any of the files."""
    return not set(record.paths) & set(current.get(record.table, ()))


def find_orphan_files(root: Root, grace: float) -> list[OrphanFile]:
    """Return the orphan files of `changes` and `compacted` older than the grace period (seconds), sorted by name."""
    found = (
        OrphanFile(f"{path.parent.parent.name}/{path.parent.name}/{path.name}", size)
        for path, size in _old_orphans(root, grace)
    )
    return sorted(found, key=attrgetter("name"))


def remove_orphan_files(root: Root, grace: float, *, dry_run: bool = False) -> VacuumResult:
    """Delete the orphan files older than the grace period (seconds); a dry run only counts them."""
    files = size = 0
    for path, length in _old_orphans(root, grace):
        if not dry_run:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # the folder has other files
                path.parent.rmdir()
        files, size = files + 1, size + length
    return VacuumResult(files, size)


def remove_staged_files(root: str | Root) -> int:
    """Delete the files that an earlier writer staged in `changes` and never committed; return their total bytes.

    Only a writer that is about to start may call this function. The earlier writer may still run. So the function first
    makes an empty commit, which makes every later commit of the earlier writer fail.
    """
    changes = as_root(root) / CHANGES
    found: list[Root] = list(changes.glob("segment=*/*.parquet"))
    fenced = FencedTable(changes)
    known = {*fenced.files()["path"].to_pylist()} | _recorded_paths(as_root(root), CHANGES)
    staged = [file for file in found if f"{file.parent.name}/{file.name}" not in known]
    last = CommitInfo.from_metadata(fenced.latest_commit_info())
    if not staged or last is None:
        return 0
    fenced.commit([], int(last.last), last.to_metadata())
    freed = 0
    for file in staged:
        with suppress(FileNotFoundError):  # a vacuum may delete the same file
            size = file.stat().st_size
            file.unlink()
            freed += size
    return freed


def _current_paths(table: Root) -> set[str]:
    if not is_table(table):
        return set()
    return set(LogTableView(table).listing()["path"].to_pylist())


def _recorded_paths(root: Root, table: str) -> set[str]:
    records = retired_files.list_removals(root).values()
    return {path for record in records if record.table == table for path in record.paths}


def _start_grace(path: Root, record: RemovedFiles, current: Mapping[str, set[str]], now: BootTimestamp) -> RemovedFiles:
    if record.seen_at is not None or not is_committed(record, current):
        return record
    record = record.seen(now)
    record.write(path)
    return record


def _pinned(root: Root, now: BootTimestamp, max_age_us: int) -> int | None:
    """Return the lowest version of `compacted` that a consumer has pinned; None if no version is pinned.

    Consumers that have been silent for more than `max_age_us` microseconds are ignored.
    """
    known = consumers.list_consumers(root)
    return min((c.pinned for c in known if c.pinned is not None and c.silent_us(now) <= max_age_us), default=None)


def _delete(file: Root, *, dry_run: bool) -> int | None:
    """Delete a file unless `dry_run` is True, and return its size in bytes; None if the file does not exist."""
    try:
        size = file.stat().st_size
        if not dry_run:
            file.unlink()
            with suppress(OSError):  # the folder has other files
                file.parent.rmdir()
    except FileNotFoundError:
        return None
    return size


def _old_orphans(root: Root, grace: float) -> Iterator[tuple[Root, int]]:
    for name in (CHANGES, COMPACTED):
        path = root / name
        if not is_table(path):
            continue
        table = open_table(path)
        known = set(add_actions(path, table)["path"].to_pylist())
        # read after the table was opened: a file that is removed later is still in the opened version
        known |= _recorded_paths(root, name)
        committed = int(last_commit_info(path, table)["timestamp"]) * 1_000_000
        # the grace also covers a difference between clocks
        before = min(committed, time.time_ns()) - int(max(grace, MIN_ORPHAN_AGE) * _SECOND_NS)
        for folder in path.iterdir():
            if not _SEGMENT.match(folder.name):
                continue
            for file in folder.iterdir():
                if f"{folder.name}/{file.name}" in known or file.name.startswith("."):
                    continue
                with suppress(FileNotFoundError):
                    stat = file.stat()
                    if stat.st_mtime_ns < before:
                        yield file, stat.st_size
