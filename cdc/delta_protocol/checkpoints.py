"""Writing of Delta checkpoints that survive a power loss, and removal of the commits before them.

delta-rs writes a checkpoint in place without fsync. A power loss can damage this checkpoint. If the older commits were
already removed, the table can then never be opened again. For a table on a disk this module therefore writes a
checkpoint under another name, syncs it, and renames it. It makes the rows of the checkpoint without delta-rs, which
needs 90 ms of CPU, unless another client has added features to the table.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from cdc import atomic_file
from cdc.bucket_files import Root
from cdc.delta_protocol.actions import decode_commit
from cdc.delta_protocol.checkpoint_rows import UnknownActions, encode_checkpoint, later_rows
from cdc.delta_protocol.commits import commit_file
from cdc.errors import LogCorrupt
from cdc.failpoint import hit

HOUR: Final = 3600.0
ASIDE: Final = "_checkpoint"
"""Name of the folder under the table in which delta-rs writes checkpoints. Readers ignore names with `_` first."""
KEEP: Final = 200
"""Number of old commits to keep on a disk before each checkpoint, because concurrent readers may need them."""
_SUFFIX: Final = ".checkpoint.parquet"
HINT: Final = "_last_checkpoint"
"""Name of the file that names the last checkpoint. A reader of the table starts at that checkpoint."""


def checkpoint(path: Path, version: int, keep: int = KEEP) -> None:
    """Write a checkpoint of the table at its newest version, and remove older commits and checkpoints.

    The commits and checkpoints of the last `keep` versions stay. Only the writer of the table may call this function,
    and only if the table is on a disk and still has the Delta version with which it was created. Raises
    FileNotFoundError if another writer has removed commits of this version, and LogCorrupt if another client wrote
    actions that the log does not have.
    """
    log = path / "_delta_log"
    _remove_leftovers(path)
    try:
        hint = _write_checkpoint(path, version)
    except UnknownActions as exc:
        raise LogCorrupt(f"another client changed table {path.name!r} of the log: {exc}") from exc
    hit("before_checkpoint_hint")
    if last_checkpoint(path) >= version:  # another writer has fenced this one
        return
    atomic_file.replace(log / HINT, hint)
    oldest = f"{max(0, version - keep):020d}"
    for file in sorted(log.glob("[0-9]*[a-z]")):  # the oldest first, see FencedTable
        if file.name < oldest:
            file.unlink(missing_ok=True)


def checkpoint_in_bucket(table: DeltaTable) -> None:
    """Write a checkpoint of a table in an object store; delta-rs chooses the files to remove.

    A writer lists commits from the last checkpoint on, so old commits cost nothing.
    """
    table.create_checkpoint()
    table.cleanup_metadata()


def _write_checkpoint(path: Path, version: int) -> bytes:
    """Write a checkpoint without delta-rs; return the content of HINT that names it."""
    content, hint = encode_checkpoint(_checkpoint_rows(path, version), version)
    atomic_file.replace(path / "_delta_log" / f"{version:020d}{_SUFFIX}", content)
    return hint


def _checkpoint_rows(path: Path, version: int) -> pa.Table:
    """Return the rows of a checkpoint of a version, from the checkpoint before it and the commits after that."""
    checkpoints = [file for file in (path / "_delta_log").glob(f"*{_SUFFIX}") if version_of(file) < version]
    last = max(checkpoints, default=None)
    earlier = None if last is None else pq.ParquetFile(last).read(use_threads=False)
    first = 0 if last is None else version_of(last) + 1
    commits = [decode_commit(commit_file(path, at).read_bytes()) for at in range(first, version + 1)]
    return later_rows(earlier, commits, time.time())


def last_checkpoint(path: Root) -> int:
    """Return the version of the last checkpoint of a table; 0 if there is none, or if its hint file is damaged."""
    try:
        return int(json.loads((path / "_delta_log" / HINT).read_bytes())["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def checkpoint_at(path: Path, version: int) -> bytes:
    """Write a checkpoint of one version of the table at `path`, with delta-rs only if the table has unknown features.

    The function does not change the file `_last_checkpoint`. It returns the new content of this file, and the caller
    writes the file. Raises DeltaError if the version does not exist.
    """
    try:
        return _write_checkpoint(path, version)
    except (UnknownActions, FileNotFoundError):  # or the commits follow a checkpoint of several files
        return _checkpoint_by_delta_rs(path, version)


def _checkpoint_by_delta_rs(path: Path, version: int) -> bytes:
    aside = _checkpoint_aside(path, version)
    _move_in(path / "_delta_log", aside)
    hint = (aside / HINT).read_bytes()
    shutil.rmtree(aside.parent, ignore_errors=True)
    return hint


def _checkpoint_aside(path: Path, version: int) -> Path:
    """Write a checkpoint of the version to a temporary `_delta_log` directory, and return that directory."""
    _remove_leftovers(path)
    aside = path / ASIDE / uuid.uuid4().hex / "_delta_log"
    aside.mkdir(parents=True)
    # the pattern excludes files that are being written: their names end in #1
    files = [file for file in sorted((path / "_delta_log").glob("[0-9]*[a-z]")) if version_of(file) <= version]
    last = max((file.name for file in files if ".checkpoint" in file.name), default="")
    for file in files:
        if file.name >= last:
            (aside / file.name).hardlink_to(file)
    DeltaTable(str(aside.parent), version=version).create_checkpoint()
    return aside


def _remove_leftovers(path: Path) -> None:
    """Remove drafts that are an hour old: from a killed process, or from a process that another writer has fenced."""
    oldest = time.time() - HOUR
    for place in (path / ASIDE).glob("*"):
        if place.stat().st_mtime < oldest:
            shutil.rmtree(place, ignore_errors=True)
    for draft in (path / "_delta_log").glob(".*.tmp"):
        with suppress(FileNotFoundError):
            if draft.stat().st_mtime < oldest:
                draft.unlink()


def _move_in(log: Path, aside: Path) -> None:
    newest = max(aside.glob("*.checkpoint*.parquet"))
    atomic_file.sync(newest)
    newest.replace(log / newest.name)
    atomic_file.sync(log)


def version_of(file: Path) -> int:
    """Return the table version that the name of a commit file or checkpoint file begins with."""
    return int(file.name[:20])
