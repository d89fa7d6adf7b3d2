"""LogWatch: looks at the log now and then while somebody wants to see it, in a thread that nobody waits for.

What reads the log takes a second and 90 MB to load, so a server that nobody asks never does; a storage that does not
answer leaves everything else as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from threading import Lock, Thread
from typing import Any, Final

from cdc.errors import CdcError, LogError
from cdc.log.object_path import BucketPath, Root
from cdc.service.log_status import LogState, LogStatus
from cdc.service.problem import Problem

SAMPLE_INTERVAL: Final = 5.0
"""Seconds between the beginnings of two looks, while somebody asks."""
BUCKET_SAMPLE_INTERVAL: Final = 20.0
"""The same for a log in an object store, where a look is some dozens of requests that are paid for."""
MAX_AGE: Final = 120.0
"""Seconds for which a look is worth showing: some time between two scrapes of Prometheus."""
ANSWER_TIMEOUT: Final = 15.0
"""Seconds after which a look that has not ended is told of."""
_STOP_TIMEOUT: Final = 2.0
"""Seconds to wait for a look when the server stops."""

utc_now: Final = partial(datetime.now, UTC)
"""The clock of a running process."""


class LogSampler:
    """One log as it was last seen; safe to ask from any thread."""

    def __init__(
        self,
        root: str | Root,
        file: str = "FILE",
        clock: Callable[[], datetime] = utc_now,
        *,
        every: float | None = None,
    ) -> None:
        """file: the definition, as commands name it. every: seconds between two looks, if not what suits the place."""
        self._root, self._clock, self._file = root, clock, file
        suits = BUCKET_SAMPLE_INTERVAL if isinstance(root, BucketPath) else SAMPLE_INTERVAL
        self._every = suits if every is None else every
        self._reader: Any = None
        self._status: LogStatus | None = None
        self._read_at = self._started_at = float("-inf")
        self._thread: Thread | None = None
        self._lock = Lock()

    @property
    def current(self) -> LogStatus | None:
        """What the last look found; None before the first one, and when that was long ago."""
        now = time.monotonic()
        if self._thread is not None and now - self._started_at > ANSWER_TIMEOUT:
            return self._not_answering(now - self._started_at)
        return self._status if now - self._read_at <= MAX_AGE else None

    def refresh(self) -> LogStatus | None:
        """The same, and a look begins if the last one was some seconds ago."""
        with self._lock:
            if self._thread is None and time.monotonic() - self._started_at >= self._every:
                self._started_at = time.monotonic()
                self._thread = Thread(target=self._run, name="log watch", daemon=True)
                self._thread.start()
        return self.current

    def wait(self, seconds: float) -> LogStatus | None:
        """The same once the look has ended, or what can be said after so many seconds."""
        self.refresh()
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
            if thread.is_alive():
                return self._not_answering(seconds)
        return self.current

    def stop(self) -> None:
        """Let a look that is under way end, or go on without it."""
        thread = self._thread
        if thread is not None:
            thread.join(_STOP_TIMEOUT)

    def _run(self) -> None:
        try:
            self._status = self._read_status()
            self._read_at = time.monotonic()
        finally:
            self._thread = None

    def _read_status(self) -> LogStatus:
        status_reader = import_module("cdc.service.log_status_reader")
        try:
            self._reader = status_reader.open_log(self._root, self._reader)
            found: LogStatus = status_reader.log_status(self._root, self._reader, self._clock(), self._file)
        except CdcError as exc:
            # of the errors of a log, the one of no kind says that there is none
            return self._without(LogState.ABSENT if type(exc) is LogError else LogState.UNREADABLE, exc)
        except Exception as exc:  # noqa: BLE001 - storage and Delta fail in many words, and the page goes on
            said = str(exc).partition("\n")[0][:200]
            error = LogError(f"the log cannot be read: {type(exc).__name__}: {said}", remedy=self._remedy)
            return self._without(LogState.UNREADABLE, error)
        return found

    def _without(self, state: LogState, exc: CdcError) -> LogStatus:
        self._reader = None  # it is opened anew next time
        problem = Problem("log", exc.code, exc.message, self._remedy if state is LogState.ABSENT else exc.fix)
        return LogStatus(at=self._clock().isoformat(), state=state, problems=(problem,))

    def _not_answering(self, seconds: float) -> LogStatus:
        message = f"the log's storage has not answered for {seconds:.0f} s"
        problem = Problem("log", LogError.code, message, self._remedy)
        return LogStatus(at=self._clock().isoformat(), state=LogState.UNREADABLE, problems=(problem,))

    @property
    def _remedy(self) -> str:
        return f"check log.path and its storage, then 'cdc log ls -c {self._file}'"
