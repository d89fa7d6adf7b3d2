"""Repair of a torn commit: the newest commit of a table, incomplete after a power loss.

delta-rs makes a commit visible and the writer syncs it afterwards, before anything depends on it. An incomplete commit
was therefore never confirmed, and its changes are written again. Its version number stays in use, because a reader
that has read the empty commit would never read another one with that number.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import structlog

from cdc import atomic_file
from cdc.log.layout import commit_file
from cdc.log.object_path import BucketPath, Root

log = structlog.get_logger("log")


def repair_torn_commit(path: Root) -> None:
    """Replace a torn newest commit by an empty one; a torn first commit is removed.

    Only for the writer of the table. A commit in progress is never visible in part.
    """
    if isinstance(path, BucketPath) or not (numbers := _versions(path)):
        return
    newest = commit_file(path, max(numbers))
    if _actions(newest):
        return
    log.warning("replaced an incomplete commit, which was never confirmed, by an empty one", commit=str(newest))
    if before := _actions(commit_file(path, max(numbers) - 1)) if max(numbers) else None:
        atomic_file.replace(newest, next(action for action in before if b'"commitInfo"' in action) + b"\n")
    elif not max(numbers):
        newest.unlink()


def _versions(path: Path) -> list[int]:
    names = [commit.stem for commit in (path / "_delta_log").glob("[0-9]*.json")]
    return [int(name) for name in names if name.isdecimal()]


def _actions(commit: Path) -> list[bytes]:
    """The actions of a commit; empty if the file is missing or incomplete."""
    with suppress(FileNotFoundError, ValueError):
        actions = [line for line in commit.read_bytes().splitlines() if line]
        return actions if all(isinstance(json.loads(action), dict) for action in actions) else []
    return []
