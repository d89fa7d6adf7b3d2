"""LogSampler: reads the status of the log in a background thread, but only while clients request it.

Loading the code that reads the log takes a second and 90 MB. A server loads it when a client first requests the status.
A storage that does not answer blocks only the background thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from threading import Lock, Thread
from typing import Any, Final

from cdc.bucket_files import BucketPath, Root
from cdc.errors import CdcError, LogError
from cdc.service.log_status_records import LogState, LogStatus
from cdc.service.problem import Problem

SAMPLE_INTERVAL: Final = 5.0
"""Seconds from the start of one sample to the start of the next sample, while clients request the status."""
BUCKET_SAMPLE_INTERVAL: Final = 20.0
"""SAMPLE_INTERVAL for a log in an object store, where one sample costs dozens of requests."""
MAX_AGE: Final = 120.0
"""Maximum age in seconds of a sample that is shown; longer than the interval between two scrapes of Prometheus."""
ANSWER_TIMEOUT: Final = 15.0
"""Seconds after which an unfinished sample is reported as a problem."""
_STOP_TIMEOUT: Final = 2.0
"""Maximum seconds to wait for a running sample when the server stops."""

utc_now: Final = partial(datetime.now, UTC)
"""Clock that returns the current time in UTC."""


class LogSampler:
    """The latest status of one log; safe to call from any thread."""

    def __init__(
        self,
        root: str | Root,
        file: str = "FILE",
        clock: Callable[[], datetime] = utc_now,
        *,
        every: float | None = None,
    ) -> None:
        """Create a sampler for the log under `root`; `every` is the number of seconds between two samples.

        If `every` is None, the kind of the log's storage determines the interval. `file` is the path of the definition
        in the commands that a problem's remedy contains.
        """
        self._root = root
        self._clock = clock
        self._file = file
        default = BUCKET_SAMPLE_INTERVAL if isinstance(root, BucketPath) else SAMPLE_INTERVAL
        self._every = default if every is None else every
        self._reader: Any = None
        self._status: LogStatus | None = None
        self._read_at = self._started_at = float("-inf")
        self._thread: Thread | None = None
        self._lock = Lock()

    @property
    def current(self) -> LogStatus | None:
        """Return the last status; None before the first sample, or if the last sample is older than MAX_AGE.

        If the running sample takes longer than ANSWER_TIMEOUT, the returned status reports the delay.
        """
        now = time.monotonic()
        if self._thread is not None and now - self._started_at > ANSWER_TIMEOUT:
            return self._not_answering(now - self._started_at)
        return self._status if now - self._read_at <= MAX_AGE else None

    def refresh(self) -> LogStatus | None:
        """Start a sample if one is due and none is running; return the last status without waiting for the sample."""
        with self._lock:
            if self._thread is None and time.monotonic() - self._started_at >= self._every:
                self._started_at = time.monotonic()
                self._thread = Thread(target=self._run, name="log sampler", daemon=True)
                self._thread.start()
        return self.current

    def wait(self, seconds: float) -> LogStatus | None:
        """Start a sample if one is due, wait until the running sample has ended, and return the status.

        If the sample does not end within `seconds`, the returned status reports the timeout.
        """
        self.refresh()
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
            if thread.is_alive():
                return self._not_answering(seconds)
        return self.current

    def stop(self) -> None:
        """Wait at most _STOP_TIMEOUT seconds for a running sample to end."""
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
        contents = import_module("cdc.service.log_contents")
        status_reader = import_module("cdc.service.log_status_reader")
        try:
            self._reader = contents.open_log(self._root, self._reader)
            found: LogStatus = status_reader.log_status(self._root, self._reader, self._clock(), self._file)
        except CdcError as exc:
            # a plain LogError, not a subclass, means that there is no log
            return self._without(LogState.ABSENT if type(exc) is LogError else LogState.UNREADABLE, exc)
        except Exception as exc:  # noqa: BLE001 - storage and Delta raise many types, and the page must still render
            detail = str(exc).partition("\n")[0][:200]
            error = LogError(f"the log cannot be read: {type(exc).__name__}: {detail}", remedy=self._remedy)
            return self._without(LogState.UNREADABLE, error)
        return found

    def _without(self, state: LogState, exc: CdcError) -> LogStatus:
        self._reader = None  # the next sample opens it again
        problem = Problem("log", exc.code, exc.message, self._remedy if state is LogState.ABSENT else exc.fix)
        return LogStatus(at=self._clock().isoformat(), state=state, problems=(problem,))

    def _not_answering(self, seconds: float) -> LogStatus:
        message = f"the log's storage has not answered for {seconds:.0f} s"
        problem = Problem("log", LogError.code, message, self._remedy)
        return LogStatus(at=self._clock().isoformat(), state=LogState.UNREADABLE, problems=(problem,))

    @property
    def _remedy(self) -> str:
        return f"check log.path and its storage, then run 'cdc log ls -c {self._file}'"
