"""A LogWriter that retries while the log's storage accepts no writes.

Nothing is given up meanwhile: the caller's thread waits, the pipes before it fill, the socket is not read, the WAL
waits at the source, and status updates go on from their own thread. After a failure the table is opened anew and
what it holds decides (a failed fsync may have dropped the very pages that a second one would call safe).
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Collection, Sequence
from threading import Event
from typing import Final, NoReturn, TypeVar

import pyarrow as pa
from deltalake.exceptions import DeltaError

from cdc.back_off import BackOff
from cdc.errors import LogCorrupt, LogError, LogFenced, LogUnreachable, LogUnwritable
from cdc.failpoint import hit
from cdc.log.layout import CHANGES, CommitInfo, LogIdentity
from cdc.log.object_path import Root, as_root
from cdc.log.segments import SegmentLimits
from cdc.log.writer import EncodedFile, LogWriter, StagedFile, encoded
from cdc.position import Position

_T = TypeVar("_T")
FULL: Final = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ESTALE,
    errno.EACCES, errno.EPERM,
})  # fmt: skip
"""What a person or time mends without the reader; anything else is a fault of its own."""
PAUSES: Final = BackOff(0.1, 5.0)
"""Seconds: soon enough to be noticed when there is room again, seldom enough to cost nothing."""


class RetryingWriter:
    """LogWriter's reading side and its writing calls; one process, one thread."""

    def __init__(self, root: str | Root, limits: SegmentLimits, stop: Event, blocked: Callable[[bool], None]) -> None:
        """`blocked` is told True when storage begins to fail and False when it takes again; stop ends the waiting."""
        self._root, self._limits, self._stop, self._blocked = as_root(root), limits, stop, blocked
        self._writer = LogWriter(root, limits)

    @property
    def identity(self) -> LogIdentity:
        """Of the source that the log was made for."""
        return self._writer.identity

    @property
    def durable(self) -> Position | None:
        """The last position in the log."""
        return self._writer.durable

    @property
    def last_commit(self) -> CommitInfo | None:
        """What the latest commit says of itself."""
        return self._writer.last_commit

    def stage(self, rows: pa.Table) -> list[StagedFile]:
        """As LogWriter.stage."""
        return self.stage_encoded(encoded(rows))

    def stage_encoded(self, files: Sequence[EncodedFile]) -> list[StagedFile]:
        """As LogWriter.stage_encoded."""
        hit("before_data_file")
        return self._until_it_works(lambda: self._writer.stage_encoded(files))

    def commit(self, files: Sequence[StagedFile], info: CommitInfo) -> None:
        """As LogWriter.commit; one that failed after it was visible is recognised by its token."""
        before, token = self._writer.durable, uuid.uuid4().hex
        first = True

        def attempt() -> None:
            nonlocal first
            again, first = not first, False
            if again and self._writer.last_token == token:
                return
            self._check_still(before)
            self._writer.commit(files, info, token)

        self._until_it_works(attempt)

    def trim(self, segments: Collection[int], upto: Position) -> None:
        """As LogWriter.trim."""
        self._where_it_was(lambda: self._writer.trim(segments, upto))

    def rewrite(self, made: Sequence[StagedFile], gone: Sequence[str]) -> bool:
        """As LogWriter.rewrite."""
        return self._where_it_was(lambda: self._writer.rewrite(made, gone))

    def _where_it_was(self, action: Callable[[], _T]) -> _T:
        before = self._writer.durable

        def attempt() -> _T:
            self._check_still(before)
            return action()

        return self._until_it_works(attempt)

    def _check_still(self, before: Position | None) -> None:
        """A writer opened again must find the log where the last one left it."""
        if self._writer.durable != before:
            raise LogFenced(f"another writer committed to the log after {before!s}")

    def _until_it_works(self, action: Callable[[], _T]) -> _T:
        failures = 0
        while True:
            try:
                done = action()
            except (OSError, DeltaError, pa.ArrowException, LogError) as exc:
                if not is_storage_failure(exc):
                    self._give_up(exc)
                if not failures:
                    self._blocked(True)
                reopened = False
                while not reopened:  # an old writer does not know whether its commit is in the log
                    failures += 1
                    if self._stop.wait(PAUSES.seconds(failures)):
                        raise LogUnwritable(f"the log's storage accepts no writes: {_reason(exc)}") from exc
                    reopened = self._reopen()
            else:
                if failures:
                    self._blocked(False)
                return done

    def _give_up(self, exc: Exception) -> NoReturn:
        if (gone := missing_log_error(self._root)) is not None:
            raise gone from exc
        raise exc

    def _reopen(self) -> bool:
        """Look at what the table holds; False if storage refuses again.

        Raises LogFenced if another writer committed: it may have taken away what this one has staged.
        """
        try:
            writer = LogWriter(self._root, self._limits)
        except (OSError, DeltaError, LogError) as exc:
            if not is_storage_failure(exc):
                self._give_up(exc)
            return False
        if writer.last_token not in self._writer.tokens:
            raise LogFenced(f"another writer committed to the log after {self._writer.durable!s}")
        self._writer = writer
        return True


def is_storage_failure(error: BaseException) -> bool:
    """Whether the storage refused for a reason that may go by itself; delta-rs and Arrow tell it in words only."""
    if isinstance(error, LogUnreachable) or (isinstance(error, OSError) and error.errno in FULL):
        return True
    if isinstance(error, LogError):
        return error.__cause__ is not None and is_storage_failure(error.__cause__)
    text = str(error)
    return any(f"os error {code}" in text or os.strerror(code) in text for code in FULL)


def classify_storage_error(root: Root, error: OSError) -> Exception:
    """The error of ours for one that a file of the log gave; the same one if it has nothing to do with the log."""
    if (found := missing_log_error(root)) is not None:
        return found
    if is_storage_failure(error) and str(error.filename or root).startswith(str(root)):
        return LogUnwritable(f"the log's storage accepts no writes: {_reason(error)}")
    return error


def missing_log_error(root: Root) -> LogCorrupt | None:
    """The error that stops a reader whose log was there and is not any more; None while there is one.

    Nothing makes another log in its place: the changes between it and the slot would be in neither.
    """
    if (root / CHANGES / "_delta_log").is_dir():
        return None
    return LogCorrupt(
        f"the log's directory {str(root)!r} is gone: it was deleted, moved or unmounted while the reader ran",
        remedy="restore the directory from a backup, or mount its volume, and start the reader again; without a backup "
        "run 'cdc slots drop -c FILE' and start the reader, which creates a new log and copies every table",
    )


def _reason(error: BaseException) -> str:
    text = f"{error} {error.__cause__}"
    return next((os.strerror(code) for code in FULL if os.strerror(code) in text), type(error).__name__)
