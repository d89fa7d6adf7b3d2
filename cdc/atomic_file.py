"""Atomic, durable file writes: write a temporary file, fsync it, rename or link it, fsync the directory."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol


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
