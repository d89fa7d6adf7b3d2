"""The capture process: runs the reader with its status reporter and backfill worker, and retries after errors."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from threading import Event, Timer
from types import FrameType
from typing import Final

import structlog
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_when_event_set
from tenacity.nap import sleep_using_event

from cdc import metrics
from cdc.capture.error_location import ERRORS_WITH_POSITIONS, add_positions
from cdc.capture.reader import Reader
from cdc.capture.recovery import declare_next_epoch
from cdc.capture.resume_checks import DISCONTINUED
from cdc.capture.retry_policy import retry_pause
from cdc.capture.settings import reader_settings
from cdc.capture.startup_checks import check_log, exposure_problems
from cdc.capture.status_reporter import StatusReporter
from cdc.config import Definition
from cdc.config.source import SnapshotMode
from cdc.errors import CdcError, ExitCode, Reaction, UndecodableWal, as_cdc_error
from cdc.log.retrying_writer import classify_storage_error
from cdc.snapshot.backfill_worker import BackfillWorker
from cdc.snapshot.watermark_window import WatermarkWindows

GRACE: Final = 8.0
"""Seconds for a drain. A longer drain waits for a server or disk that does not answer; the process then exits. That is
as safe as kill -9, because the log contains whole commits only."""
JITTER: Final = 0.25
"""Largest share by which a pause is extended at random, so that readers do not reconnect all at once."""

log = structlog.get_logger("connector")


def main(definition: Definition, reload: Callable[[], Definition] | None = None) -> int:
    """Run the reader until SIGTERM or SIGINT; raises an error that a retry cannot fix.

    reload: reads the definition again; its table rules may change while the reader runs.
    """
    stop = Event()
    last = Timer(GRACE, os._exit, [0])
    last.daemon = True

    def drain(_number: int, _frame: FrameType | None) -> None:
        if last.ident is None:  # the first signal; stop may be set already, by a failure
            last.start()
        stop.set()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    for problem in exposure_problems(definition):
        log.warning(problem.message, code=problem.code)
    figures = metrics.Metrics()
    reporter = StatusReporter(definition, figures, stop)
    reporter.start()
    windows = WatermarkWindows()
    jobs = BackfillWorker(definition, windows, figures, stop, reload)
    jobs.on_copy_done = reporter.report_copied
    jobs.start()
    attempts = _Attempts(definition, figures)
    failure: BaseException | None = None
    try:
        Retrying(
            retry=retry_if_exception(attempts.should_retry),
            wait=attempts.wait,
            stop=stop_when_event_set(stop),
            sleep=sleep_using_event(stop),
            before_sleep=reporter.report_waiting,
            reraise=True,
        )(_run, definition, figures, stop, reporter, windows)
    except BaseException as exc:  # noqa: BLE001 - raised below, after it is recorded
        failure = exc
    stop.set()
    ending = exit_error(reporter.verdict, failure)
    if ending is not None:
        reporter.report_failure(as_cdc_error(ending, "the reader"))
    elif isinstance(failure, CdcError):
        reporter.report_interrupted(failure)
    reporter.close()
    if isinstance(ending, DISCONTINUED) and definition.snapshot.mode is SnapshotMode.WHEN_NEEDED:
        return ExitCode.RUNTIME.value  # the next start begins another epoch
    if ending is not None:
        raise ending
    return ExitCode.OK.value


def exit_error(verdict: CdcError | None, failure: BaseException | None) -> BaseException | None:
    """The error that the process exits with; None after a drain, or if only the stop prevented another attempt.

    A verdict of the status reporter takes precedence, because the reader's failure is its consequence.
    """
    if verdict is not None:
        return verdict
    return None if isinstance(failure, CdcError) and failure.reaction is Reaction.RETRY else failure


class _Attempts:
    """Counts consecutive failures without progress of the log, and computes the pause after each."""

    def __init__(self, definition: Definition, figures: metrics.Metrics) -> None:
        self._name, self._figures = definition.name, figures
        self._failures = self._same_error = 0
        self._position: float | None = None
        self._code: str | None = None

    def should_retry(self, exc: BaseException) -> bool:
        """Record a failure; returns whether to try again."""
        position = self._figures.value(metrics.LOG_POSITION, self._name)
        code = exc.code if isinstance(exc, CdcError) else None
        is_stuck = position == self._position
        self._failures = self._failures + 1 if is_stuck else 1
        self._same_error = self._same_error + 1 if is_stuck and code == self._code else 1
        self._position, self._code = position, code
        # a server that restarted in between did not decode: count only attempts that failed with the same error
        self._pause = retry_pause(exc, self._same_error if isinstance(exc, UndecodableWal) else self._failures)
        return self._pause is not None

    def wait(self, _state: RetryCallState) -> float:
        """Seconds before the next attempt."""
        return (self._pause or 0.0) * (1 + random.uniform(0, JITTER))  # noqa: S311 - spreads attempts, guards nothing


def _run(
    definition: Definition, figures: metrics.Metrics, stop: Event, reporter: StatusReporter, windows: WatermarkWindows
) -> None:
    settings = reader_settings(definition)
    reporter.report_running()

    def read() -> None:
        Reader(settings, figures, stop, windows, reporter.report_started).run()

    try:
        try:
            check_log(definition)
            read()
        except DISCONTINUED as exc:
            if definition.snapshot.mode is not SnapshotMode.WHEN_NEEDED:
                raise
            declare_next_epoch(settings, exc)
            log.warning(
                "the source cannot continue the log: a new epoch begins and all tables are copied again",
                code=exc.code,
                message=exc.message,
            )
            read()
    except ERRORS_WITH_POSITIONS as exc:
        raise add_positions(exc, definition) from exc
    except OSError as exc:
        raise classify_storage_error(settings.log, exc) from exc
