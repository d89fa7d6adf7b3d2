"""Damaged commits: removes the newest commits of a table if a loss of power left them without all of their files.

A commit that no published cut names may not be on the disk yet (commit_sync.py). After a loss of power its own file may
be empty, short or missing, as may the files that it adds. delta-rs reads an empty commit file as a commit that changes
nothing, so it would not be noticed. The driver that opens a sink therefore checks the commits after the published
version, and the newest commit in any case. It removes the first damaged commit and all later ones: the table is then
what it was before, and its `txn` says from where the log is merged again.

A commit file may end after any line. Each commit of rows names its `txn` in its commit info, which is the first line;
the indexed writer and delta-rs write the `txn` last. Commits of Spark have the `txn` early, so their numbers of files
are compared with those in the commit info.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

from cdc.delta_protocol.actions import Action, decode_commit
from cdc.delta_protocol.checkpoints import HINT
from cdc.delta_protocol.commits import commit_file
from cdc.errors import TargetDamaged
from pipelines.sinks.delta.commit_sync import LOG, added_files, remove_commits

TXN_NAMED: Final = "cdc.txn"
"""Field of the commit info with the application id of the commit's `txn`."""
_COMMIT: Final = re.compile(r"(\d{20})\.json\Z")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\..*)?\.parquet\Z")
_PARQUET: Final = b"PAR1"
"""The last four bytes of a Parquet file."""
_ADDED: Final = ("numTargetFilesAdded", "numAddedFiles", "numFiles")
"""Metrics of Spark with the number of files that a commit adds, in the commit info."""
_REMOVED: Final = ("numTargetFilesRemoved", "numRemovedFiles")
_SYNCED_TOGETHER: Final = 3
"""Greatest number of commits that a driver makes in the tables next to its targets before it syncs them."""

log = structlog.get_logger("apply")


def remove_damaged_commits(uri: str, published: int) -> None:
    """Remove the damaged newest commits and checkpoints of the table at `uri`, if it is on a disk.

    published: version of the last published cut; -1 if there is none. Only the driver that fills the table may call
    this function, and only before it opens the table. Raises TargetDamaged if an earlier commit is damaged.
    """
    folder = Path(uri) / LOG
    if "://" in uri or not folder.is_dir():
        return
    names = sorted(file.name for file in folder.iterdir())
    versions = [int(match[1]) for name in names if (match := _COMMIT.match(name)) is not None]
    if not versions:
        return
    gone = [name for name in names if _is_damaged_checkpoint(folder / name, versions[-1])]
    checkpoints = {int(match[1]) for name in names if name not in gone and (match := _CHECKPOINT.match(name))}
    damaged = _first_damaged(Path(uri), versions, max(checkpoints, default=-1), published)
    if damaged is not None and damaged <= published and damaged != versions[-1]:
        raise TargetDamaged(f"commit {damaged} in the Delta log of target {uri!r} is empty or missing")
    later = [version for version in versions if damaged is not None and version >= damaged]
    if later or gone:
        log.warning(
            "removed commits of a target that were not completely on the disk; their changes are merged again",
            target=uri,
            published_version=published,
            versions=later,
            checkpoints=gone,
        )
    _remove(Path(uri), later, gone, checkpoints.difference(later))


def remove_damaged_newest(uri: str) -> None:
    """Remove the newest commits of a table on a disk if they are damaged; earlier commits were synced before them.

    Only the one writer of the table may call this function, and only before it opens the table.
    """
    versions = [int(match[1]) for file in _files(uri) if (match := _COMMIT.match(file.name)) is not None]
    if versions:
        remove_damaged_commits(uri, max(versions) - _SYNCED_TOGETHER)


def _files(uri: str) -> Iterable[Path]:
    folder = Path(uri) / LOG
    return () if "://" in uri or not folder.is_dir() else folder.iterdir()


def _first_damaged(table: Path, versions: Sequence[int], base: int, published: int) -> int | None:
    """Return the first damaged version; None if there is none.

    versions: those of all commit files, ascending. base: version of the newest checkpoint; commits before it may be
    missing.
    """
    expected = base + 1
    for version in versions:
        is_new = version > published or version == versions[-1]
        is_missing_before = version > base and version != expected
        if is_missing_before or (is_new and not _is_whole(table, version, versions[-1])):
            return version
        if version > base and not commit_file(table, version).stat().st_size:
            return version
        expected = max(expected, version + 1)
    return None


def _is_whole(table: Path, version: int, newest: int) -> bool:
    """Return whether a commit file and the files that it adds are complete. newest: version of the newest commit."""
    try:
        actions = decode_commit(commit_file(table, version).read_bytes())
    except ValueError:
        return False
    if not actions or not _has_every_line(actions):
        return False
    absent = [path for path, size in added_files(actions) if _size(table / path) < size]
    return not absent or _are_removed(table, absent, range(version + 1, newest + 1))


def _has_every_line(actions: Collection[Action]) -> bool:
    info: Mapping[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    has_txn = any("txn" in action for action in actions)
    if info.get(TXN_NAMED) and not has_txn:
        return False
    added, removed = (sum(kind in action for action in actions) for kind in ("add", "remove"))
    if not has_txn and (added or removed):
        return True  # of another client, which may count its files in another way
    metrics = info.get("operationMetrics") or {}
    return added >= _greatest(metrics, _ADDED) and removed >= _greatest(metrics, _REMOVED)


def _greatest(metrics: Mapping[str, Any], names: Iterable[str]) -> int:
    return max((int(metrics[name]) for name in names if str(metrics.get(name, "")).isdigit()), default=0)


def _are_removed(table: Path, paths: Collection[str], versions: Iterable[int]) -> bool:
    """Return whether later commits no longer have these files, so that maintenance may have deleted them."""
    remaining = {*paths}
    for version in versions:
        with suppress(OSError, ValueError):
            for action in decode_commit(commit_file(table, version).read_bytes()):
                if "remove" in action:
                    remaining -= {path for path, _ in added_files([{"add": action["remove"] | {"size": 0}}])}
    return not remaining


def _is_damaged_checkpoint(file: Path, newest: int) -> bool:
    """Return whether a file is a checkpoint that is not complete, or one after the newest commit."""
    match = _CHECKPOINT.match(file.name)
    if match is None:
        return False
    if int(match[1]) > newest:
        return True
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - len(_PARQUET)))
        return content.read() != _PARQUET


def _named_checkpoint(hint: Path) -> int | None:
    """Return the version that `_last_checkpoint` names; None if the file is damaged."""
    try:
        return int(json.loads(hint.read_bytes())["version"])
    except (ValueError, KeyError, TypeError):
        return None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return -1


def _remove(table: Path, versions: Collection[int], gone: Collection[str], checkpoints: Collection[int]) -> None:
    """Remove commits, and checkpoints with the names `gone`. checkpoints: versions of those that stay."""
    hint = table / LOG / HINT
    is_wrong = hint.exists() and _named_checkpoint(hint) not in checkpoints
    for name in gone:
        (table / LOG / name).unlink(missing_ok=True)
    if is_wrong:
        hint.unlink()
    if versions or gone or is_wrong:
        remove_commits(table, versions)
