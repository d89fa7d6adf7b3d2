"""The connector process: one reader, the reporter beside it, and when to try again."""

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
from cdc.config.definition import SnapshotMode
from cdc.errors import CdcError, ExitCode, Reaction, UndecodableWal, as_cdc_error
from cdc.log.retrying_writer import classify_storage_error
from cdc.snapshot.backfill_worker import BackfillWorker
from cdc.snapshot.watermark_window import WatermarkWindows

GRACE: Final = 8.0
"""Seconds for a drain. What takes longer waits for a server or a disk that does not answer, and ends with the process:
the log holds whole commits only, so that this is no worse than kill -9."""
JITTER: Final = 0.25
"""Share of a pause by which it may be longer, so that readers do not come back all at once."""

log = structlog.get_logger("connector")


def main(definition: Definition, again: Callable[[], Definition] | None = None) -> int:
    """Run the reader until SIGTERM or SIGINT; raises the error that a retry cannot mend.

    again: reads the definition anew, of which the rules for tables may change meanwhile.
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
    placing = WatermarkWindows()
    jobs = BackfillWorker(definition, placing, figures, stop, again)
    jobs.at_end = reporter.copied
    jobs.start()
    attempts = _Attempts(definition, figures)
    failure: BaseException | None = None
    try:
        Retrying(
            retry=retry_if_exception(attempts.again),
            wait=attempts.wait,
            stop=stop_when_event_set(stop),
            sleep=sleep_using_event(stop),
            before_sleep=reporter.waiting,
            reraise=True,
        )(_run, definition, figures, stop, reporter, placing)
    except BaseException as exc:  # noqa: BLE001 - raised below, once it is recorded
        failure = exc
    stop.set()
    ending = exit_error(reporter.verdict, failure)
    if ending is not None:
        reporter.failed(as_cdc_error(ending, "the reader"))
    elif isinstance(failure, CdcError):
        reporter.gave_up(failure)
    reporter.end()
    if isinstance(ending, DISCONTINUED) and definition.snapshot.mode is SnapshotMode.WHEN_NEEDED:
        return ExitCode.RUNTIME.value  # the next start begins another epoch
    if ending is not None:
        raise ending
    return ExitCode.OK.value


def exit_error(verdict: CdcError | None, failure: BaseException | None) -> BaseException | None:
    """What the process ends with: nothing after a drain, or after an attempt that only a stop kept from being repeated.

    A verdict comes first: the failure of the reader that it stopped is its consequence.
    """
    if verdict is not None:
        return verdict
    return None if isinstance(failure, CdcError) and failure.reaction is Reaction.RETRY else failure


class _Attempts:
    """Counts the failures after which the log did not get on, and asks how long to wait."""

    def __init__(self, definition: Definition, figures: metrics.Metrics) -> None:
        self._name, self._figures = definition.name, figures
        self._failures = self._alike = 0
        self._position: float | None = None
        self._code: str | None = None

    def again(self, exc: BaseException) -> bool:
        """Take note of a failure; whether there is to be another attempt."""
        position = self._figures.value(metrics.LOG_POSITION, self._name)
        code = exc.code if isinstance(exc, CdcError) else None
        is_stuck = position == self._position
        self._failures = self._failures + 1 if is_stuck else 1
        self._alike = self._alike + 1 if is_stuck and code == self._code else 1
        self._position, self._code = position, code
        # a server that restarted in between has not tried to decode: only attempts that did are counted as such
        self._pause = retry_pause(exc, self._alike if isinstance(exc, UndecodableWal) else self._failures)
        return self._pause is not None

    def wait(self, _state: RetryCallState) -> float:
        """Seconds before it."""
        return (self._pause or 0.0) * (1 + random.uniform(0, JITTER))  # noqa: S311 - spreads attempts, guards nothing


def _run(
    definition: Definition, figures: metrics.Metrics, stop: Event, reporter: StatusReporter, placing: WatermarkWindows
) -> None:
    settings = reader_settings(definition)
    reporter.running()

    def read() -> None:
        Reader(settings, figures, stop, placing, reporter.started).run()

    try:
        try:
            check_log(definition)
            read()
        except DISCONTINUED as exc:
            if definition.snapshot.mode is not SnapshotMode.WHEN_NEEDED:
                raise
            declare_next_epoch(settings, exc)
            log.warning("the source cannot continue the log: all is copied again", code=exc.code, message=exc.message)
            read()
    except ERRORS_WITH_POSITIONS as exc:
        raise add_positions(exc, definition) from exc
    except OSError as exc:
        raise classify_storage_error(settings.log, exc) from exc
