"""Destination that appends events to files as lines of JSON: exactly once, rotated by size.

The progress is `progress.json` next to the files. It contains the name of the current file and its length at the last
commit. Opening the destination cuts off what a killed process wrote after that, so each event is in the files once.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
from collections.abc import Collection, Sequence
from io import FileIO
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from cdc import atomic_file
from cdc.config.destinations import FileDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, Promise
from cdc.delivery.destinations.event_json import line_encoder
from cdc.errors import DeliveryFenced, DestinationFull, DestinationUnavailable, ProgressDamaged
from cdc.failpoint import hit

PROGRESS: Final = "progress.json"
LOCK: Final = ".lock"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Committed(NamedTuple):
    """Content of PROGRESS."""

    file: int
    length: int
    progress: bytes


class FileDestination:
    """Files `NAME-000001.jsonl`, `NAME-000002.jsonl`, … in one directory."""

    promise: ClassVar = Promise.EXACTLY_ONCE
    stores_progress: ClassVar = True

    def __init__(self, settings: FileDelivery, identity: DeliveryIdentity) -> None:
        self._settings, self._name = settings, identity.name
        self._line = line_encoder(settings)
        self._folder = Path(settings.path.removeprefix("file://"))
        self._lock: int | None = None
        self._file: FileIO | None = None
        self._number = 1

    def open(self) -> bytes | None:
        """Lock the directory, remove what was not committed, and return the progress."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            stored = self._stored()
            self._number, length = (stored.file, stored.length) if stored is not None else (1, 0)
            self._remove_later_files()
            self._file = self._path(self._number).open("ab", buffering=0)
            if os.fstat(self._file.fileno()).st_size < length:
                raise ProgressDamaged(
                    f"file {str(self._path(self._number))!r} is shorter than {PROGRESS!r} next to it says",
                    remedy=f"restore the file, or remove {PROGRESS!r} to begin again as a new delivery does",
                )
            self._file.truncate(length)
        except OSError as exc:
            raise self._failed(exc) from exc
        return None if stored is None else stored.progress

    def check(self, topics: Collection[str]) -> None:
        """Check that the directory can be written, or created, and that its progress can be read."""
        del topics
        existing = next(one for one in (self._folder, *self._folder.absolute().parents) if one.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise DestinationUnavailable(f"cannot write to {str(self._folder)!r}: {str(existing)!r} is not writable")
        try:
            self._stored()
        except OSError as exc:
            raise self._failed(exc) from exc

    def send(self, events: Sequence[Event]) -> None:
        """Append the events."""
        assert self._file is not None  # noqa: S101 - the contract: opened before
        try:
            lines = memoryview(b"".join(map(self._line, events)))
            while lines:
                lines = lines[self._file.write(lines) :]
        except OSError as exc:
            raise self._failed(exc) from exc

    def commit(self, progress: bytes) -> None:
        """Write the file through to the disk, then replace the progress; begin a new file if this one is large."""
        assert self._file is not None  # noqa: S101 - the contract: opened before
        try:
            if self._settings.fsync:
                os.fsync(self._file.fileno())
            hit("file_written")
            length = os.fstat(self._file.fileno()).st_size
            if length >= self._settings.rotate:
                self._file.close()
                self._number, length = self._number + 1, 0
                self._file = self._path(self._number).open("ab", buffering=0)
                atomic_file.sync(self._folder)
            record = {"file": self._number, "length": length, "progress": base64.b64encode(progress).decode()}
            atomic_file.replace(self._folder / PROGRESS, json.dumps(record).encode())
        except OSError as exc:
            raise self._failed(exc) from exc

    def close(self) -> None:
        """Close the file and release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        self._lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(self._lock)
            self._lock = None
            raise DeliveryFenced(
                f"another process writes to {str(self._folder)!r}",
                remedy="give each delivery a directory of its own, and run one process per delivery",
            ) from exc

    def _stored(self) -> _Committed | None:
        try:
            content = (self._folder / PROGRESS).read_bytes()
        except FileNotFoundError:
            return None
        try:
            found = json.loads(content)
            progress = base64.b64decode(found["progress"], validate=True)
            return _Committed(int(found["file"]), int(found["length"]), progress)
        except (ValueError, KeyError, TypeError) as exc:
            raise ProgressDamaged(f"the progress of a delivery cannot be read: {self._folder / PROGRESS}") from exc

    def _remove_later_files(self) -> None:
        number = self._number + 1
        while self._path(number).exists():
            self._path(number).unlink()
            number += 1

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number:06}.jsonl"

    def _failed(self, exc: OSError) -> DestinationUnavailable:
        kind = DestinationFull if exc.errno in _FULL else DestinationUnavailable
        return kind(f"cannot write to {str(self._folder)!r}: {exc.strerror or type(exc).__name__}")
