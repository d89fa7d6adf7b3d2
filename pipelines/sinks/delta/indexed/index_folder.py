"""Index folder: the directory of one key index, which only one process may use at a time."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO, Final

import structlog

from cdc.file_modes import make_private_directory

LOCK: Final = "lock"
"""Name of the file that is locked while the folder is in use."""

log = structlog.get_logger("apply")


class IndexFolder:
    """A folder that is created, and locked, when it is first needed. Any thread may use it."""

    def __init__(self, wanted: Path | None) -> None:
        """wanted: the folder. If it is None, cannot be written or is in use, a temporary folder takes its place."""
        self.wanted = wanted
        self._path: Path | None = None
        self._opening = Lock()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._lock: IO[str] | None = None

    @property
    def is_temporary(self) -> bool:
        """Whether the folder is temporary, or would be if it was created."""
        return self.wanted is None or self._temporary is not None

    @property
    def path(self) -> Path:
        """Path of the folder; the first use creates and locks it."""
        with self._opening:
            if self._path is None:
                self._lock = None if self.wanted is None else _locked(self.wanted)
                if self.wanted is None or self._lock is None:
                    self._temporary = tempfile.TemporaryDirectory(prefix="cdc-key-index-")
                    self._path = Path(self._temporary.name)
                else:
                    self._path = self.wanted
            return self._path

    def clear(self) -> None:
        """Delete everything in the folder."""
        for file in self.path.iterdir():
            if file.name != LOCK:
                with suppress(OSError):
                    shutil.rmtree(file) if file.is_dir() else file.unlink()

    def close(self) -> None:
        """Unlock the folder, or delete the temporary one."""
        if self._temporary is not None:
            self._temporary.cleanup()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _locked(folder: Path) -> IO[str] | None:
    """Create and lock the folder; return the open lock file.

    Return None if the folder cannot be written, or if another process or IndexFolder has the lock.
    """
    try:
        make_private_directory(folder)
        lock = (folder / LOCK).open("w")
    except OSError as exc:
        log.warning(
            "the folder of a key index cannot be written; the index will be built again at each start",
            folder=str(folder),
            reason=str(exc),
        )
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
