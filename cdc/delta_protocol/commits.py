"""Commit files of Delta tables: their names, and the only code that creates or replaces one.

A commit is the file of the next version of its table, and the storage creates this file only if it does not exist. So
two writers never make the same version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol, Self, TypeVar

from cdc import atomic_file
from cdc.delta_protocol.actions import Action, encode_commit

LOG_FOLDER: Final = "_delta_log"
"""Folder of the commits and checkpoints below the directory of a table."""


class _Folder(Protocol):
    """A folder on a disk or in an object store."""

    def __truediv__(self, below: str, /) -> Self: ...


_Table = TypeVar("_Table", bound=_Folder)
CreateFile = Callable[[str, bytes], object]
"""Creates a file atomically, by its path relative to the table's directory. Raises FileExistsError if it exists."""


def commit_name(version: int) -> str:
    """Return the name of the commit file that creates this version of a table."""
    return f"{version:020d}.json"


def commit_path(version: int) -> str:
    """Return the path of a commit file, relative to the table's directory."""
    return f"{LOG_FOLDER}/{commit_name(version)}"


def commit_file(table: _Table, version: int) -> _Table:
    """Return the path of the commit file that created this version of the table."""
    return table / LOG_FOLDER / commit_name(version)


def create_commit(create: CreateFile, version: int, actions: Iterable[Action]) -> None:
    """Make a version of a table; the commit is as durable as `create` makes its files.

    Raises FileExistsError, and changes nothing, if the version exists.
    """
    create(commit_path(version), encode_commit(actions))


def replace_commit(table: Path, version: int, actions: Iterable[Action]) -> None:
    """Replace the commit of a version durably by one with other actions; only for a commit that nobody can read."""
    atomic_file.replace(commit_file(table, version), encode_commit(actions))


def rewrite_commit(table: Path, version: int) -> None:
    """Write the commit of a version to a new file with the same content, and sync it.

    To repeat the fsync of the existing file is not enough: if an fsync has failed before, the kernel may have marked
    the pages of the file as clean without writing them.
    """
    commit = commit_file(table, version)
    atomic_file.replace(commit, commit.read_bytes())
