"""Atomic, durable file writes: write a temporary file, fsync it, rename or link it, fsync the directory.

A file that must be created only once, such as a commit, is linked under its name: the link fails if the name exists.
delta-rs commits in the same way. A file system without hard links is refused.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from cdc.errors import HardLinksUnsupported

_SYNCS_AT_ONCE: Final = 8
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
"""Errors of `link` on a file system that makes no hard links."""


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
    this call created. Hidden files and other errors are as for `replace`. Raises HardLinksUnsupported on a file system
    without hard links.
    """
    if not isinstance(path, Path):
        path.create_bytes(content)
        return
    with _synced_draft(path, content) as draft:
        link(draft, path)
    sync(path.parent)


def link(file: Path, name: Path) -> None:
    """Give a file a second name in the same file system.

    Raises FileExistsError if the name exists, HardLinksUnsupported on a file system without hard links.
    """
    try:
        name.hardlink_to(file)
    except OSError as exc:
        if exc.errno in _NO_LINKS:
            reason = (exc.strerror or str(exc)).lower()
            raise HardLinksUnsupported(
                f"the file system of {str(name.parent)!r} makes no hard links: {reason}"
            ) from exc
        raise


def probe_writable(folder: Path) -> None:
    """Write a small file into the folder and remove it; raises OSError if this fails.

    If the folder does not exist, the function tests its nearest existing parent instead.
    """
    with _probe(folder):
        pass


def probe_links(folder: Path) -> None:
    """Test as `probe_writable` does, and also link the file; raises HardLinksUnsupported if that fails."""
    with _probe(folder) as draft:
        linked = draft.with_suffix(".link")
        try:
            link(draft, linked)
        finally:
            with suppress(OSError):
                linked.unlink(missing_ok=True)


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


@contextmanager
def _probe(folder: Path) -> Iterator[Path]:
    """Write a small file into the folder, or into its nearest existing parent, and remove it after the block."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    draft = folder / f".probe-{uuid.uuid4().hex}.tmp"
    try:
        draft.write_bytes(b"probe")
        yield draft
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


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
