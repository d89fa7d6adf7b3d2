"""Torn: a table's newest commit that a loss of power left without its bytes.

delta-rs makes a commit visible and the writer syncs it a moment later, before anything relies on it. So one that is
not whole was never confirmed, and what it was to say is said again. Its number stays taken: whoever has read it as
empty would never look at another commit of that number.
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
    """Let the newest commit of the table at path change nothing if it is torn, or the table not be there if it made it.

    For whoever is about to write the table; a commit that is being made is never seen in part.
    """
    if isinstance(path, BucketPath) or not (numbers := _versions(path)):
        return
    newest = commit_file(path, max(numbers))
    if _actions(newest):
        return
    log.warning("a commit that was never confirmed is not whole, and changes nothing", commit=str(newest))
    if before := _actions(commit_file(path, max(numbers) - 1)) if max(numbers) else None:
        atomic_file.replace(newest, next(action for action in before if b'"commitInfo"' in action) + b"\n")
    elif not max(numbers):
        newest.unlink()


def _versions(path: Path) -> list[int]:
    names = [commit.stem for commit in (path / "_delta_log").glob("[0-9]*.json")]
    return [int(name) for name in names if name.isdecimal()]


def _actions(commit: Path) -> list[bytes]:
    """What a commit says, an action each; nothing if it is not there or not whole."""
    with suppress(FileNotFoundError, ValueError):
        actions = [line for line in commit.read_bytes().splitlines() if line]
        return actions if all(isinstance(json.loads(action), dict) for action in actions) else []
    return []
