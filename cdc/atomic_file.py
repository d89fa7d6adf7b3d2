"""Atomic file writes that survive a loss of power: write a draft, sync it, rename it, sync the directory."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class StoredObject(Protocol):
    """A file in an object store, which replaces content in one step and shows only what is durable."""

    def write_bytes(self, content: bytes, /) -> object:
        """Put the content in the file's place."""


def replace(path: Path | StoredObject, content: bytes) -> None:
    """Put the content in the file's place in one step; raises OSError, and then the old file or the new one stands.

    In a directory it is written to a hidden file beside it first, which only a killed process leaves behind. An object
    store does all of it by itself; raises LogUnreachable and LogInaccessible there.
    """
    if not isinstance(path, Path):
        path.write_bytes(content)
        return
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("wb") as sink:
            sink.write(content)
            sink.flush()
            os.fsync(sink.fileno())
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def probe(folder: Path) -> None:
    """Write a small file in the folder, or in the nearest one above it that exists, and remove it; raises OSError."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    draft = folder / f".probe-{uuid.uuid4().hex}.tmp"
    try:
        draft.write_bytes(b"probe")
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def sync(path: Path | StoredObject) -> None:
    """Bring the bytes of a file, or the names in a directory, to the disk; raises OSError.

    What an object store shows is durable already.
    """
    if not isinstance(path, Path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
