"""Checkpoint: a table's files in one, from which it is opened; what it makes superfluous goes.

delta-rs writes one in place and does not sync it. After a loss of power the table could not be opened, or, once the
commits behind it were cleaned away, never again: so on a disk it is made aside, and moved in when it is safe.
"""

from __future__ import annotations

import shutil
import time
import uuid
from pathlib import Path
from typing import Final

from deltalake import DeltaTable

from cdc import atomic_file
from cdc.log.object_path import BucketPath, Root

HOUR: Final = 3600.0
ASIDE: Final = "_checkpoint"
"""Under the table; no reader of Delta tables looks into such a folder."""
KEPT: Final = 200
"""Commits behind a checkpoint that stay on a disk for who opens the table meanwhile; each further one lists them."""
HINT: Final = "_last_checkpoint"
"""Names the last checkpoint; readers begin there."""


def checkpoint(path: Root, table: DeltaTable, kept: int = KEPT) -> None:
    """Make one of the table at that path, for its one writer, and remove the commits that are old enough."""
    if isinstance(path, BucketPath):  # asked only for what comes behind the last checkpoint, however much there is
        table.create_checkpoint()
        table.cleanup_metadata()
        return
    log, version = path / "_delta_log", int(table.version())
    atomic_file.replace(log / HINT, checkpoint_at(path, version))
    oldest = f"{max(0, version - kept):020d}"
    for file in log.glob("[0-9]*[a-z]"):
        if file.name < oldest:
            file.unlink(missing_ok=True)


def checkpoint_at(path: Path, version: int) -> bytes:
    """Make one of any version in its place; gives the hint that names it. Raises DeltaError for one that is not there.

    For a table in a directory.
    """
    aside = _made_aside(path, version)
    _move_in(path / "_delta_log", aside)
    hint = (aside / HINT).read_bytes()
    shutil.rmtree(aside.parent, ignore_errors=True)
    return hint


def _made_aside(path: Path, version: int) -> Path:
    """A `_delta_log` with a checkpoint of that version."""
    for place in (path / ASIDE).glob("*"):  # of killed processes, or of one that was overtaken and does not know it
        if place.stat().st_mtime < time.time() - HOUR:
            shutil.rmtree(place, ignore_errors=True)
    aside = path / ASIDE / uuid.uuid4().hex / "_delta_log"
    aside.mkdir(parents=True)
    # not what is being written, which ends in #1
    files = [file for file in sorted((path / "_delta_log").glob("[0-9]*[a-z]")) if version_of(file) <= version]
    last = max((file.name for file in files if ".checkpoint" in file.name), default="")
    for file in files:
        if file.name >= last:
            (aside / file.name).hardlink_to(file)
    DeltaTable(str(aside.parent), version=version).create_checkpoint()
    return aside


def _move_in(log: Path, aside: Path) -> None:
    newest = max(aside.glob("*.checkpoint*.parquet"))
    atomic_file.sync(newest)
    newest.replace(log / newest.name)
    atomic_file.sync(log)


def version_of(file: Path) -> int:
    """Of the table, that a commit or a checkpoint is about."""
    return int(file.name[:20])
