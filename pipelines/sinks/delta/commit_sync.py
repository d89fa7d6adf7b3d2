"""Commit sync: syncs the files of all new commits of a sink's targets to the disk, before a published cut names them.

No writer of a target syncs its files: neither the indexed writer nor delta-rs nor Spark. So a batch costs one group of
fsync calls whatever its number of tables and files, and the calls of a group wait for the disk together. Until then a
loss of power may damage the new commits. The next driver removes those (damaged_commits.py), and merges again.

A store of objects needs no sync, because it shows only durable objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from cdc import atomic_file
from cdc.delta_protocol.actions import Action, decode_commit
from cdc.delta_protocol.checkpoints import HINT
from cdc.delta_protocol.commits import commit_file
from cdc.delta_protocol.deletion_vectors import path_of

LOG: Final = "_delta_log"


class CommitSync:
    """Remembers up to which version the commits of each target are durable. One thread uses it at a time."""

    def __init__(self) -> None:
        self._durable: dict[str, int] = {}
        """URI of a target → version up to which its commits are durable."""

    def begin(self, versions: Mapping[str, int]) -> None:
        """Take over the versions of the last published cut, which are durable. versions: URI of a target → version."""
        self._durable = dict(versions)

    def unsynced(self, versions: Mapping[str, int]) -> set[Path]:
        """Return the files and directories that must be synced before a cut may name these versions."""
        found = set[Path]()
        for uri, version in versions.items():
            durable = self._durable.get(uri, -1)
            if version > durable and "://" not in uri:
                found |= files_of_commits(Path(uri), durable, version)
        return found

    def confirm(self, versions: Mapping[str, int]) -> None:
        """Remember that the commits up to these versions are durable."""
        self._durable |= versions

    def withdraw(self, versions: Mapping[str, int]) -> None:
        """Remove the commits up to these versions that are not durable, because their files could not be synced.

        No published cut names them. The targets must be opened again, and their changes are then merged again.
        """
        for uri, version in versions.items():
            durable = self._durable.get(uri, -1)
            if version > max(durable, 0) and "://" not in uri:
                remove_commits(Path(uri), range(max(durable, 0) + 1, version + 1))


def remove_commits(table: Path, versions: Iterable[int]) -> None:
    """Remove commits and their checkpoints, the newest first, so that no commit is missing between others."""
    folder = table / LOG
    removed = sorted(versions, reverse=True)
    if removed and (folder / HINT).exists():
        (folder / HINT).unlink()  # readers then look for the last checkpoint themselves
    for version in removed:
        for file in folder.glob(f"{version:020d}.*"):
            file.unlink(missing_ok=True)
    atomic_file.sync(folder)


def sync_commits(uri: str, after: int, upto: int) -> None:
    """Sync the files of the commits in (after, upto] of the table at `uri`, if it is on a disk."""
    if "://" not in uri and upto > after:
        atomic_file.sync_all(files_of_commits(Path(uri), after, upto))


def files_of_commits(table: Path, after: int, upto: int) -> set[Path]:
    """Return the commit files in (after, upto], the files that they add, and the directories of all these files.

    A commit file that no longer exists is left out: it was removed once a synced checkpoint had replaced it.
    """
    files = set[Path]()
    for version in range(after + 1, upto + 1):
        commit = commit_file(table, version)
        try:
            actions = decode_commit(commit.read_bytes())
        except FileNotFoundError:
            continue
        files.add(commit)
        files.update(table / path for path, _ in added_files(actions))
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(table)}
    return files | folders


def added_files(actions: Sequence[Action]) -> Iterator[tuple[str, int]]:
    """Yield the path and the least size of each data file, change data file and deletion vector that a commit adds.

    Paths are relative to the table's directory. A data file that only gets another deletion vector is not new.
    """
    present = {action["remove"]["path"] for action in actions if "remove" in action}
    for action in actions:
        add = action.get("add") or action.get("cdc")
        if add is None:
            continue
        if add["path"] not in present and "://" not in add["path"]:
            yield unquote(add["path"]), int(add["size"])
        vector = add.get("deletionVector")
        path = None if vector is None else path_of(vector)
        if vector is not None and path is not None:
            yield path, int(vector.get("offset") or 0) + int(vector["sizeInBytes"])
