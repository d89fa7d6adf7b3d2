"""RetryingWriter: writes through a LogWriter, and tries again while the log's storage accepts no writes.

The calling thread waits during this time. The queues of the reader fill up, the socket is no longer read, and the WAL
stays at the source. Status updates continue from their own thread.

After a failure the writer does not repeat the fsync: its success would prove nothing, because the failed fsync may have
dropped the dirty pages. The writer opens the table again, and the table's content shows whether the commit was made.
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
from cdc.bucket_files import Root, as_root
from cdc.errors import LogCorrupt, LogError, LogFenced, LogUnreachable, LogUnwritable
from cdc.failpoint import hit
from cdc.log.disk_format import CHANGES, CommitInfo, LogIdentity
from cdc.log.writer import EncodedFile, LogWriter, SegmentLimits, StagedFile, encode_files
from cdc.position import Position

_T = TypeVar("_T")
RETRIED_ERRNOS: Final = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ESTALE,
    errno.EACCES, errno.EPERM,
})  # fmt: skip
"""Numbers of the operating system errors that can end while the reader waits, such as a full disk.

Any other error stops the reader.
"""
PAUSES: Final = BackOff(0.1, 5.0)
"""Pauses between two attempts in seconds: short enough to notice free space soon, long enough to cost nothing."""


class RetryingWriter:
    """Writes through a LogWriter, and repeats writes that the storage refuses; for one thread of one process."""

    def __init__(self, root: str | Root, limits: SegmentLimits, stop: Event, blocked: Callable[[bool], None]) -> None:
        """Open the log for writing.

        The writer calls `blocked(True)` when writes begin to fail, and `blocked(False)` when they succeed again. If
        `stop` is set while a method waits for its next attempt, the method raises LogUnwritable.
        """
        self._root, self._limits, self._stop, self._blocked = as_root(root), limits, stop, blocked
        self._writer = LogWriter(root, limits)

    @property
    def identity(self) -> LogIdentity:
        """Source database for which the log was created."""
        return self._writer.identity

    @property
    def durable(self) -> Position | None:
        """Last position in the log; None before the initial snapshot."""
        return self._writer.durable

    @property
    def last_commit(self) -> CommitInfo | None:
        """Metadata of the latest commit of the log; None before the initial snapshot."""
        return self._writer.last_commit

    def stage(self, rows: pa.Table) -> list[StagedFile]:
        """Encode and write rows as `LogWriter.stage` does."""
        return self.stage_encoded(encode_files(rows))

    def stage_encoded(self, files: Sequence[EncodedFile]) -> list[StagedFile]:
        """Write encoded files as `LogWriter.stage_encoded` does."""
        hit("before_data_file")
        return self._retry(lambda: self._writer.stage_encoded(files))

    def commit(self, files: Sequence[StagedFile], info: CommitInfo) -> None:
        """Commit staged files as `LogWriter.commit` does.

        A failed attempt may nevertheless have created the commit. In this case the log's last commit has the token of
        this call, and the method does not commit again.
        """
        before, token = self._writer.durable, uuid.uuid4().hex
        first = True

        def attempt() -> None:
            nonlocal first
            is_retry, first = not first, False
            if is_retry and self._writer.last_token == token:
                return
            self._check_same_position(before)
            self._writer.commit(files, info, token)

        self._retry(attempt)

    def trim(self, segments: Collection[int], upto: Position) -> None:
        """Remove segments as `LogWriter.trim` does."""
        self._retry_at_same_position(lambda: self._writer.trim(segments, upto))

    def rewrite(self, new: Sequence[StagedFile], old: Sequence[str]) -> bool:
        """Replace files as `LogWriter.rewrite` does."""
        return self._retry_at_same_position(lambda: self._writer.rewrite(new, old))

    def _retry_at_same_position(self, action: Callable[[], _T]) -> _T:
        before = self._writer.durable

        def attempt() -> _T:
            self._check_same_position(before)
            return action()

        return self._retry(attempt)

    def _check_same_position(self, before: Position | None) -> None:
        """Raise LogFenced unless the log still ends at the position `before`."""
        if self._writer.durable != before:
            raise LogFenced(f"another writer committed to the log; last position of this writer: {before!s}")

    def _retry(self, action: Callable[[], _T]) -> _T:
        failures = 0
        while True:
            try:
                result = action()
            except (OSError, DeltaError, pa.ArrowException, LogError) as exc:
                if not is_storage_failure(exc):
                    self._raise_final(exc)
                if not failures:
                    self._blocked(True)
                reopened = False
                while not reopened:  # the old writer does not know whether its commit is in the log
                    failures += 1
                    if self._stop.wait(PAUSES.seconds(failures)):
                        raise LogUnwritable(f"the log's storage accepts no writes: {_reason(exc)}") from exc
                    reopened = self._reopen()
            else:
                if failures:
                    self._blocked(False)
                return result

    def _raise_final(self, exc: Exception) -> NoReturn:
        if (missing := missing_log_error(self._root)) is not None:
            raise missing from exc
        raise exc

    def _reopen(self) -> bool:
        """Replace the LogWriter by a new one; return False if the storage fails again.

        Raises LogFenced if another writer has committed, because that writer may have removed the staged files.
        """
        try:
            writer = LogWriter(self._root, self._limits)
        except (OSError, DeltaError, LogError) as exc:
            if not is_storage_failure(exc):
                self._raise_final(exc)
            return False
        if writer.last_token not in self._writer.tokens:
            raise LogFenced(
                f"another writer committed to the log; last position of this writer: {self._writer.durable!s}"
            )
        self._writer = writer
        return True


def is_storage_failure(error: BaseException) -> bool:
    """Return True if the error is a failure of the log's storage that can end while the reader waits.

    Examples are a full disk and an object store that does not answer.

    The function also searches the error's text, because delta-rs and Arrow report operating system errors only as text.
    """
    if isinstance(error, LogUnreachable) or (isinstance(error, OSError) and error.errno in RETRIED_ERRNOS):
        return True
    if isinstance(error, LogError):
        return error.__cause__ is not None and is_storage_failure(error.__cause__)
    text = str(error)
    return any(f"os error {code}" in text or os.strerror(code) in text for code in RETRIED_ERRNOS)


def classify_storage_error(root: Root, error: OSError) -> Exception:
    """Return the LogError that describes an OSError of a log file.

    Return the OSError itself if the log's storage is not the cause.
    """
    if (found := missing_log_error(root)) is not None:
        return found
    if is_storage_failure(error) and str(error.filename or root).startswith(str(root)):
        return LogUnwritable(f"the log's storage accepts no writes: {_reason(error)}")
    return error


def missing_log_error(root: Root) -> LogCorrupt | None:
    """Return the error for a log whose directory disappeared while the reader ran; None if the directory exists.

    The reader never creates a new log in place of the missing one. Otherwise neither of the two logs would contain the
    changes between the end of the missing log and the position of the slot.
    """
    if (root / CHANGES / "_delta_log").is_dir():
        return None
    return LogCorrupt(
        f"the log's directory {str(root)!r} is missing: the directory was deleted, moved or unmounted while the "
        "reader ran",
        remedy="restore the directory from a backup, or mount its volume, and start the reader again; without a backup "
        "run 'cdc slots drop -c FILE' and start the reader, which creates a new log and copies every table",
    )


def _reason(error: BaseException) -> str:
    text = f"{error} {error.__cause__}"
    return next((os.strerror(code) for code in RETRIED_ERRNOS if os.strerror(code) in text), type(error).__name__)
