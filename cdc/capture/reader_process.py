"""The capture process: runs the reader with its status reporter and backfill worker, and retries after errors.

The retry policy gives each class of error a pause before the next attempt, and says when the reader gives up.
"""

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
from cdc.back_off import BackOff
from cdc.capture.decode_stage import StreamObservers
from cdc.capture.failover import follow_promotion, report_promotion
from cdc.capture.operator_recovery import declare_next_epoch
from cdc.capture.reader import Reader, ReaderContext
from cdc.capture.reader_monitor import ERRORS_WITH_POSITIONS, StatusReporter, add_positions
from cdc.capture.resume_checks import DISCONTINUED
from cdc.capture.settings import reader_settings
from cdc.capture.startup_checks import check_log, exposure_problems
from cdc.config import Definition
from cdc.config.source import SnapshotMode
from cdc.errors import (
    CdcError,
    ExitCode,
    FormerPrimary,
    OutputPluginRefused,
    Reaction,
    SlotInUse,
    SourceInRecovery,
    SourceRejectsConnection,
    SourceUnreachable,
    TransactionsLost,
    UndecodableWal,
    as_cdc_error,
    process_exit_code,
)
from cdc.log.retrying_writer import classify_storage_error
from cdc.snapshot.backfill_worker import BackfillWorker
from cdc.snapshot.debezium_signals import Signals

GRACE: Final = 8.0
"""Seconds from SIGTERM or SIGINT until the process exits, even if its drain (the last commits) has not ended.

If the drain takes longer, a server or disk does not answer. Exiting then is as safe as `kill -9`, because the log
contains only whole commits."""
COPIES_END_WITHIN: Final = 2.0
"""Maximum seconds from the end of the stream until the process exits, for the threads that copy tables."""
JITTER: Final = 0.25
"""Maximum random extension of a pause, as a share of the pause, so that readers do not all reconnect at once."""
UNDECODABLE_ATTEMPTS: Final = 4
"""Number of attempts at a transaction that the server cannot decode.

Some causes disappear before the second or third attempt (a stale cache, a file that the server recreates). A value that
is too large fails every attempt, and an operator must know about it within a minute. With the pauses of UNDECODABLE the
attempts take 15 s plus the time in which the server reaches the transaction."""
FAST: Final = BackOff(0.2, 30.0)
"""Default pauses between attempts, for example while the log's storage recovers."""
NO_PRIMARY: Final = BackOff(0.2, 2.0)
"""Pauses while no server of the DSN can be read from, for example during a restart or a promotion.

The pauses are short, so that the stream continues soon after a new primary accepts connections; an attempt that fails
costs a connection for each host.
"""
SLOT_IN_USE: Final = BackOff(0.2, 1.0)
"""Pauses while another reader streams from the slot.

The pauses are short, because nothing captures changes from the end of the other reader until the next attempt. An
attempt costs a few short connections."""
REFUSED: Final = BackOff(5.0, 60.0)
"""Pauses while the server refuses the login or has no free connection; frequent attempts could lock the account."""
UNDECODABLE: Final = BackOff(2.0, 8.0)
"""Pauses between attempts at a transaction that the server cannot decode; each attempt decodes the same WAL again."""

log = structlog.get_logger("connector")


def main(definition: Definition, reload: Callable[[], Definition] | None = None) -> int:
    """Run the reader until SIGTERM or SIGINT, and return the exit status; raises an error that a retry cannot fix.

    reload: function that reads the definition again, because table rules may change while the reader runs.
    """
    stop = Event()
    signals = Signals(definition)
    context = ReaderContext(stop=stop, observers=StreamObservers(signals=signals.queue))
    reporter = StatusReporter(definition, context.metrics, stop)
    last = Timer(GRACE, exit_late, [reporter])
    last.daemon = True

    def drain(_number: int, _frame: FrameType | None) -> None:
        if last.ident is None:  # the first signal; stop may be set already, by a failure
            last.start()
        stop.set()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    for problem in exposure_problems(definition):
        log.warning(problem.message, code=problem.code)
    reporter.start()
    backfills = BackfillWorker(definition, context.link, signals, context.metrics, reload)
    backfills.start()
    attempts = _Attempts(definition, context.metrics)
    failure: BaseException | None = None
    try:
        Retrying(
            retry=retry_if_exception(attempts.should_retry),
            wait=attempts.wait,
            stop=stop_when_event_set(stop),
            sleep=sleep_using_event(stop),
            before_sleep=reporter.report_waiting,
            reraise=True,
        )(_run, definition, context, reporter)
    except BaseException as exc:  # noqa: BLE001 - raised below, after it is recorded
        failure = exc
    stop.set()
    backfills.end(COPIES_END_WITHIN)
    if backfills.has_copied_all:
        reporter.report_copied()
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


def exit_late(reporter: StatusReporter) -> None:
    """End the process, whose drain takes too long, with the status that it would have had."""
    os._exit(0 if reporter.verdict is None else process_exit_code(reporter.verdict).value)


def exit_error(verdict: CdcError | None, failure: BaseException | None) -> BaseException | None:
    """Return the error with which the process exits; None if the process was stopped on request.

    After a stop on request, `failure` is None or an error that the reader would have retried.

    verdict: error because of which the status reporter stopped the reader. It takes precedence over `failure`, the
    error with which the reader then ended.
    """
    if verdict is not None:
        return verdict
    return None if isinstance(failure, CdcError) and failure.reaction is Reaction.RETRY else failure


def retry_pause(error: BaseException, failures: int) -> float | None:
    """Return the seconds to wait before the next attempt; None if the reader gives up.

    failures: number of consecutive failed attempts without progress of the log, including this one. For UndecodableWal
    only the attempts that failed with UndecodableWal count.
    """
    if isinstance(error, UndecodableWal):
        return UNDECODABLE.seconds(failures) if failures < UNDECODABLE_ATTEMPTS else None
    if not isinstance(error, CdcError) or error.reaction is not Reaction.RETRY:
        return None
    if isinstance(error, SlotInUse):
        return SLOT_IN_USE.seconds(failures)
    if isinstance(error, SourceUnreachable | SourceInRecovery | FormerPrimary):
        return NO_PRIMARY.seconds(failures)
    is_refused = isinstance(error, SourceRejectsConnection | OutputPluginRefused)
    return (REFUSED if is_refused else FAST).seconds(failures)


class _Attempts:
    """Counter of consecutive failures without a new commit in the log; computes the pause after each failure."""

    def __init__(self, definition: Definition, process_metrics: metrics.Metrics) -> None:
        self._name, self._metrics = definition.name, process_metrics
        self._failures = self._same_error = 0
        self._position: float | None = None
        self._code: str | None = None
        self._pause: float | None = None

    def should_retry(self, exc: BaseException) -> bool:
        """Record a failure; return True if the reader tries again."""
        position = self._metrics.value(metrics.LOG_POSITION, self._name)
        code = exc.code if isinstance(exc, CdcError) else None
        is_stuck = position == self._position
        self._failures = self._failures + 1 if is_stuck else 1
        self._same_error = self._same_error + 1 if is_stuck and code == self._code else 1
        self._position, self._code = position, code
        # a server that restarted in between did not decode: count only attempts that failed with the same error
        self._pause = retry_pause(exc, self._same_error if isinstance(exc, UndecodableWal) else self._failures)
        return self._pause is not None

    def wait(self, _state: RetryCallState) -> float:
        """Return the seconds to wait before the next attempt."""
        return (self._pause or 0.0) * (1 + random.uniform(0, JITTER))  # noqa: S311 - spreads attempts, guards nothing


def _run(definition: Definition, context: ReaderContext, reporter: StatusReporter) -> None:
    settings = reader_settings(definition)
    reporter.report_running()

    def read() -> None:
        Reader(settings, context, reporter.report_started).run()

    try:
        try:
            check_log(definition)
            read()
        except TransactionsLost:
            if followed := follow_promotion(definition):
                report_promotion(followed, definition.name, context.metrics)
            read()
        except DISCONTINUED as exc:
            if definition.snapshot.mode is not SnapshotMode.WHEN_NEEDED:
                raise
            declare_next_epoch(settings, exc)
            log.warning(
                "the source cannot continue the log: the reader begins a new epoch and copies all tables again",
                code=exc.code,
                message=exc.message,
            )
            read()
    except ERRORS_WITH_POSITIONS as exc:
        raise add_positions(exc, definition) from exc
    except OSError as exc:
        raise classify_storage_error(settings.log, exc) from exc
