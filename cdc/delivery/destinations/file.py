"""Destination that appends events to files as lines of JSON: exactly once, rotated by size.

The progress is `progress.json` next to the files. It contains the name of the current file and its length at the last
commit. Opening the destination cuts off what a killed process wrote after that, so each event is in the files once.

Nothing that was committed is ever cut off. `.lock` has the number of the last commit, which is written after the
progress. So a progress that is missing, or older than the last commit, is found: the destination then opens with an
error, and the first commit after it begins a new file behind all files that exist.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import re
from collections.abc import Collection, Sequence
from io import FileIO
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from cdc import atomic_file
from cdc.config.destinations import FileDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, Promise
from cdc.delivery.destinations.event_json import line_encoder
from cdc.errors import (
    DeliveryFenced,
    DestinationFull,
    DestinationUnavailable,
    ProgressDamaged,
    ProgressLost,
)
from cdc.failpoint import hit

PROGRESS: Final = "progress.json"
LOCK: Final = ".lock"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LAST_COMMIT_BYTES: Final = 64
"""Length of the content of LOCK: a write of so few bytes that replaces as many is not torn."""


class _Committed(NamedTuple):
    """Content of PROGRESS."""

    delivery: str
    """Name of the delivery to which the directory belongs."""
    commit: int
    """Number of commits up to this one; 0 before the first."""
    file: int
    length: int
    progress: bytes | None
    """None before the first commit."""


class _LastCommit(NamedTuple):
    """Content of LOCK: the last commit that was stored, or one before it if the power failed."""

    commit: int
    file: int


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
        """The current file; None until it is needed if the progress is in doubt."""
        self._number = 1
        self._commits = 0

    def open(self) -> bytes | None:
        """Lock the directory, cut off what was not committed, and return the progress."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            return self._open_files()
        except OSError as exc:
            raise self._failed(exc) from exc

    def check(self, topics: Collection[str]) -> None:
        """Check that the directory can be written, or created, and that its progress fits its files."""
        del topics
        existing = next(one for one in (self._folder, *self._folder.absolute().parents) if one.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise DestinationUnavailable(f"cannot write to {str(self._folder)!r}: {str(existing)!r} is not writable")
        try:
            # in this order, because a process that sends may commit in between
            sizes = self._sizes()
            last = self._last_commit()
            stored = self._stored()
            self._check_progress(stored, last, sizes)
            if stored is not None:
                self._check_length(stored)
        except OSError as exc:
            raise self._failed(exc) from exc

    def send(self, events: Sequence[Event]) -> None:
        """Append the events."""
        try:
            file = self._current()
            lines = memoryview(b"".join(map(self._line, events)))
            while lines:
                lines = lines[file.write(lines) :]
        except OSError as exc:
            raise self._failed(exc) from exc

    def commit(self, progress: bytes) -> None:
        """Write the file through to the disk, then replace the progress; begin a new file if this one is large."""
        try:
            file = self._current()
            if self._settings.fsync:
                os.fsync(file.fileno())
            hit("file_written")
            length = os.fstat(file.fileno()).st_size
            if length >= self._settings.rotate:
                file.close()
                self._number, length = self._number + 1, 0
                self._file = self._path(self._number).open("ab", buffering=0)
                atomic_file.sync(self._folder)
            committed = _Committed(self._name, self._commits + 1, self._number, length, progress)
            self._store(committed)
            self._commits = committed.commit
            hit("file_committed")
            self._store_last_commit(_LastCommit(committed.commit, committed.file))
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

    def _open_files(self) -> bytes | None:
        """Open the current file and return the progress. If it cannot be trusted, change no file and raise the reason;
        the next commit begins a file with a new number.
        """
        sizes, last = self._sizes(), self._last_commit()
        self._number = max(0 if last is None else last.file, *sizes, 0) + 1
        self._commits = 0 if last is None else last.commit
        stored = self._stored()
        self._check_progress(stored, last, sizes)
        if stored is None:
            stored = _Committed(self._name, 0, max(sizes, default=1), 0, None)
            self._store(stored)
        self._check_length(stored)
        self._number, self._commits = stored.file, stored.commit
        self._current().truncate(stored.length)
        self._store_last_commit(_LastCommit(stored.commit, stored.file), is_first=last is None)
        return stored.progress

    def _current(self) -> FileIO:
        if self._file is None:
            self._file = self._path(self._number).open("ab", buffering=0)
        return self._file

    def _check_progress(self, stored: _Committed | None, last: _LastCommit | None, sizes: dict[int, int]) -> None:
        """Raise an error if files have events that a missing or older progress does not have."""
        where = str(self._folder)
        if stored is None:
            if last is not None or any(sizes.values()):
                raise ProgressLost(f"{where!r} has files of delivery {self._name!r}, but no {PROGRESS!r}")
            return
        if stored.delivery != self._name:
            raise DestinationUnavailable(
                f"{where!r} has the progress of delivery {stored.delivery!r}",
                remedy="give each delivery a directory of its own",
            )
        is_cut = any(size and number > stored.file for number, size in sizes.items())
        is_unproved = last is None and stored.commit > 0 and sizes.get(stored.file, 0) > stored.length
        if is_cut or is_unproved or (last is not None and last.commit > stored.commit):
            raise ProgressLost(f"{PROGRESS!r} in {where!r} is older than the files of delivery {self._name!r} there")

    def _check_length(self, stored: _Committed) -> None:
        """Raise ProgressDamaged if the current file has lost events."""
        path = self._path(stored.file)
        if stored.length > (path.stat().st_size if path.exists() else 0):
            raise ProgressDamaged(f"file {str(path)!r} is shorter than {PROGRESS!r} next to it says")

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
            fields = json.loads(content)
            encoded = fields["progress"]
            return _Committed(
                # an earlier version of the record has neither
                delivery=str(fields.get("delivery", self._name)),
                commit=int(fields.get("commit", 0)),
                file=int(fields["file"]),
                length=int(fields["length"]),
                progress=None if encoded is None else base64.b64decode(encoded, validate=True),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ProgressDamaged(f"the progress of a delivery cannot be read: {self._folder / PROGRESS}") from exc

    def _store(self, committed: _Committed) -> None:
        encoded = None if committed.progress is None else base64.b64encode(committed.progress).decode()
        record = committed._asdict() | {"progress": encoded}
        atomic_file.replace(self._folder / PROGRESS, json.dumps(record).encode())

    def _last_commit(self) -> _LastCommit | None:
        """Return the last commit; None before the first."""
        try:
            content = (self._folder / LOCK).read_bytes()
            return _LastCommit(**json.loads(content)) if content else None
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as exc:
            raise ProgressDamaged(f"the last commit of a delivery cannot be read: {self._folder / LOCK}") from exc

    def _store_last_commit(self, last: _LastCommit, *, is_first: bool = False) -> None:
        assert self._lock is not None  # noqa: S101 - the contract: opened before
        os.pwrite(self._lock, json.dumps(last._asdict()).ljust(_LAST_COMMIT_BYTES).encode(), 0)
        if is_first:
            os.fsync(self._lock)  # later ones replace it in its place

    def _sizes(self) -> dict[int, int]:
        """Return number and length of each file of the delivery."""
        name = re.compile(rf"{re.escape(self._name)}-(\d{{6,}})\.jsonl")
        files = self._folder.iterdir() if self._folder.is_dir() else ()
        return {int(found[1]): file.stat().st_size for file in files if (found := name.fullmatch(file.name))}

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number:06}.jsonl"

    def _failed(self, exc: OSError) -> DestinationUnavailable:
        kind = DestinationFull if exc.errno in _FULL else DestinationUnavailable
        return kind(f"cannot write to {str(self._folder)!r}: {exc.strerror or type(exc).__name__}")
