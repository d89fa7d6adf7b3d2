"""Delta log: checks the `_delta_log` of a Delta table for new commits, and removes old commits.

On a local disk, delta-rs lists every file of `_delta_log` with each commit and each refresh. A commit takes 6 ms with
100 files in `_delta_log`, 13 ms with 400, 54 ms with 5,000 and 840 ms with 80,000. A table that changes every second
has 80,000 files after a day. So old commits of local tables are removed. In an object store, delta-rs lists only the
files after the last checkpoint, so old commits stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc import atomic_file
from cdc.delta_protocol.checkpoints import HINT, checkpoint_at, version_of
from cdc.delta_protocol.commits import commit_file
from cdc.delta_protocol.table_storage import storage_of
from cdc.failpoint import hit
from pipelines.sinks.delta.indexed.delta_log import LiveFiles, vector_paths

_LOG_FILE: Final = re.compile(r"_delta_log/(\d{20})\.(?:json|crc|checkpoint(?:\.\d{10}\.\d{10})?\.parquet)\Z")
_CHECKPOINT: Final = re.compile(r"_delta_log/(\d{20})\.checkpoint\.parquet\Z")

LOG: Final = "_delta_log"
DELETION_VECTORS_FEATURE: Final = "deletionVectors"
"""Name of the table feature in the Delta protocol."""
CHECKPOINT_EVERY: Final = 50
"""Number of table versions between two checkpoints of `_delta_log`. At each commit that delta-rs makes, it reads all
commits since the last checkpoint twice. The indexed writer does not read them, but waits for the checkpoints.
"""
CHECKPOINTS_AT_ONCE: Final = 20
"""Maximum number of checkpoints that one call of remove_old_commits creates; each takes about 10 ms."""


def is_newest(uri: str, version: int) -> bool:
    """Return whether `version` is the newest version of a Delta table; False if that is uncertain.

    It is always False for a table in an object store.
    """
    if "://" in uri:
        return False
    table = Path(uri)
    if not commit_file(table, version).exists() or commit_file(table, version + 1).exists():
        return False
    try:
        return bool(json.loads((table / LOG / HINT).read_bytes())["version"] <= version)
    except FileNotFoundError:
        return True
    except ValueError:  # another process is writing it
        return False


def write_checkpoint(uri: str, version: int) -> None:
    """Write a checkpoint of the newest version of a table, at which clients then start to read."""
    if "://" in uri:
        DeltaTable(uri, version=version).create_checkpoint()
    else:
        atomic_file.replace(Path(uri) / LOG / HINT, checkpoint_at(Path(uri), version))


def remove_old_commits(
    uri: str, newest: int, listed: Collection[int] = (), *, kept: int, brief: Collection[int] = ()
) -> int:
    """Remove the files of `_delta_log` that no remaining version needs; return their number.

    newest: the newest version of the table. listed: older versions that must stay readable; each gets a checkpoint, or
    keeps the commits since the checkpoint before. kept: number of newest versions that stay readable. brief: those of
    the listed versions that are not listed for long: they keep fewer than CHECKPOINT_EVERY commits rather than get a
    checkpoint. In an object store nothing is removed.
    """
    if "://" in uri:
        return 0
    table = Path(uri)
    files = sorted((table / LOG).glob("[0-9]*[a-z]"))
    checkpoints = {version_of(file) for file in files if file.match("*.checkpoint.parquet")}
    begins = _last_until(newest - kept, checkpoints)
    needed, bases, created = set[int](), {begins}, 0
    for version in sorted(version for version in listed if version < begins):
        first = _last_until(version, checkpoints)
        is_near = version in brief and version - first < CHECKPOINT_EVERY
        if version != first and not is_near and created < CHECKPOINTS_AT_ONCE:
            created += 1
            checkpoints |= _create_checkpoint(table, version)
            first = _last_until(version, checkpoints)
        bases.add(first)
        needed.update(range(first, version + 1))
    removed = [file for file in files if version_of(file) < begins and version_of(file) not in needed]
    if removed:  # delta-rs does not sync checkpoints
        for version in bases & checkpoints:
            atomic_file.sync(table / LOG / f"{version:020d}.checkpoint.parquet")
        atomic_file.sync(table / LOG)
    for file in removed:  # oldest first, so that no commit is missing between others
        hit("delta_log_shortened")
        file.unlink(missing_ok=True)
    return len(removed)


def _last_until(version: int, checkpoints: Collection[int]) -> int:
    """Return the last of the checkpoints at or before a version; 0 if there is none."""
    return max((known for known in checkpoints if known <= version), default=0)


def _create_checkpoint(table: Path, version: int) -> set[int]:
    """Create a checkpoint of a version; return a set with the version, or an empty set if that fails."""
    with suppress(DeltaError):
        checkpoint_at(table, version)
        return {version}
    return set()


def data_paths_of(table: DeltaTable) -> frozenset[str]:
    """Return the paths of the live data files of a table, relative to its directory."""
    root = table.table_uri.removeprefix("file://").rstrip("/") + "/"
    return frozenset(uri.removeprefix("file://").removeprefix(root) for uri in table.file_uris())


def paths_of(table: DeltaTable) -> frozenset[str]:
    """Return the paths of the live data files of a table, and of the files with their deletion vectors.

    The paths are relative to the directory of the table.
    """
    paths = data_paths_of(table)
    if DELETION_VECTORS_FEATURE not in (table.protocol().writer_features or ()):
        return paths
    storage = storage_of(table.table_uri.removeprefix("file://").rstrip("/"))
    files = LiveFiles.read(storage, table.version(), with_vectors=False)
    return paths | vector_paths(files.by_path.values())


def expired_log_files(paths: Iterable[str], oldest: int) -> list[str]:
    """Return the `_delta_log` files among `paths` that version `oldest` and later versions do not need.

    These files are older than the last checkpoint at or before version `oldest`.
    """
    versions = {path: int(found[1]) for path in paths if (found := _LOG_FILE.match(path))}
    starts = [version for path, version in versions.items() if version <= oldest and _CHECKPOINT.match(path)]
    start = max(starts, default=0)
    return [path for path, version in versions.items() if version < start]
