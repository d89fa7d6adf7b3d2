"""Vacuum: deletes files that commits removed from the log's tables, once no reader can still use them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from cdc.log import consumers, removed_files
from cdc.log.boot_clock import SECOND, BootTimestamp
from cdc.log.object_path import Root, as_root
from cdc.log.removed_files import RemovedFiles
from cdc.log.retention import Retention, deletable, is_committed
from cdc.log.storage import is_table, open_table


@dataclass(frozen=True, slots=True)
class VacuumResult:
    """Number and bytes of deleted files, or of the files that a dry run would delete."""

    files: int = 0
    size: int = 0
    """Bytes."""


def vacuum(root: str | Root, retention: Retention, *, dry_run: bool = False) -> VacuumResult:
    """Delete files that were removed from a table longer than the grace ago, except those that a consumer pins.

    Several processes may do it at the same time. The grace of a file starts at the first vacuum after its removal.
    """
    root, now = as_root(root), BootTimestamp.now()
    # the records are read before the tables: a commit in between is then seen as committed
    notes = removed_files.list_removals(root)
    held = {table: _held(root / table) for table in {note.table for note in notes.values()}}
    if not dry_run:
        notes = {file: _seen(file, note, held, now) for file, note in notes.items()}
    pinned = _pinned(root, now, int(retention.max_age * SECOND)) if notes else None
    chosen = deletable(notes.values(), held, pinned=pinned, grace=retention.grace, now=now)
    files = size = 0
    for file, note in notes.items():
        if note in chosen:
            for path in note.paths:
                gone = _remove(root / note.table / path, dry_run=dry_run)
                files, size = files + (gone is not None), size + (gone or 0)
            if not dry_run:
                file.unlink(missing_ok=True)
    return VacuumResult(files, size)


def waiting(root: str | Root) -> int:
    """Bytes of removed files that are still on the disk, from the records alone."""
    return sum(note.size for note in removed_files.list_removals(root).values())


def _held(path: Root) -> set[str]:
    if not is_table(path):
        return set()
    return set(pa.table(open_table(path).get_add_actions())["path"].to_pylist())


def _seen(file: Root, note: RemovedFiles, held: Mapping[str, set[str]], now: BootTimestamp) -> RemovedFiles:
    if note.seen_at is not None or not is_committed(note, held):
        return note
    note = note.seen(now)
    note.write(file)
    return note


def _pinned(root: Root, now: BootTimestamp, max_age_us: int) -> int | None:
    """The lowest version that a consumer pins which has reported within the maximum age."""
    known = consumers.list_consumers(root)
    return min((c.pinned for c in known if c.pinned is not None and c.silent_us(now) <= max_age_us), default=None)


def _remove(file: Root, *, dry_run: bool) -> int | None:
    try:
        size = file.stat().st_size
        if not dry_run:
            file.unlink()
            with suppress(OSError):  # other files are in it
                file.parent.rmdir()
    except FileNotFoundError:
        return None
    return size
