"""Atomic, durable file writes: write a temporary file, fsync it, rename or link it, fsync the directory."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final, Protocol

_SYNCS_AT_ONCE: Final = 8


class SyncFailed(OSError):
    """The disk did not take what was written: it may be lost, even if a repeated fsync succeeds."""


class StoredObject(Protocol):
    """A file in an object store; the store replaces content atomically, and readers see only durable content."""

    def write_bytes(self, content: bytes, /) -> object:
        """Replace the content of the file."""

    def create_bytes(self, content: bytes, /) -> object:
        """Create the file; raises FileExistsError if it exists."""


def replace(path: Path | StoredObject, content: bytes) -> None:
    """Replace the content of a file atomically; after an OSError the file has either the old or the new content.

    On a disk the function first writes a hidden file in the same directory. The hidden file remains only if the process
    is killed. In an object store it calls `write_bytes`, which may raise LogUnreachable or LogInaccessible.
    """
    if not isinstance(path, Path):
        path.write_bytes(content)
        return
    with _synced_draft(path, content) as draft:
        draft.replace(path)
    sync(path.parent)


def create(path: Path | StoredObject, content: bytes) -> None:
    """Create a file atomically with its content; raises FileExistsError if the file exists.

    The file is durable when the function returns. After any other OSError the file is missing, or it has its content
    and may not survive a power loss. In an object store a repeated request may raise FileExistsError for the file that
    this call created. Hidden files and other errors are as for `replace`.
    """
    if not isinstance(path, Path):
        path.create_bytes(content)
        return
    with _synced_draft(path, content) as draft:
        path.hardlink_to(draft)
    sync(path.parent)


def probe_writable(folder: Path) -> None:
    """Write a small file into the folder and remove it; raises OSError if this fails.

    If the folder does not exist, the function tests its nearest existing parent instead.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    draft = folder / f".probe-{uuid.uuid4().hex}.tmp"
    try:
        draft.write_bytes(b"probe")
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def sync(path: Path | StoredObject) -> None:
    """Fsync a file or a directory. Raises OSError.

    In an object store this does nothing, because only durable content is visible there.
    """
    if not isinstance(path, Path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(paths: Collection[Path]) -> None:
    """Fsync files and directories, several at once; raises SyncFailed, after all calls have ended.

    A file system answers fsync calls that wait at the same time with one write of its journal, so a group takes hardly
    longer than one file. A path that no longer exists is skipped.
    """
    futures = [_threads().submit(_sync_existing, path) for path in paths]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise SyncFailed(str(errors[0])) from errors[0]


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents durably; does nothing if it exists."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def _sync_existing(path: Path) -> None:
    with suppress(FileNotFoundError):
        sync(path)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_SYNCS_AT_ONCE, "fsync")


@contextmanager
def _synced_draft(path: Path, content: bytes) -> Iterator[Path]:
    """Write and fsync a hidden file in the directory of `path`, and remove it after the block if it is still there."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("wb") as sink:
            sink.write(content)
            sink.flush()
            os.fsync(sink.fileno())
        yield draft
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
