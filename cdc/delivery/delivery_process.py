"""The delivery process: one thread per delivery, its requests, its reports, and the way the process ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from threading import Event, Thread
from types import FrameType
from typing import Any, Final

import structlog

from cdc import metrics
from cdc.back_off import BackOff
from cdc.catalog import Catalog, DeadLetter, ProcessReport, RecordedProgress, SinkProgress
from cdc.catalog.process_lease import leased
from cdc.config import Definition
from cdc.config.destinations import Delivery
from cdc.delivery.delivery_figures import DeliveryFigures
from cdc.delivery.delivery_requests import DeliveryRequests
from cdc.delivery.opened_delivery import OpenedDelivery, opened_delivery
from cdc.delivery.progress import check_progress
from cdc.errors import CdcError, Reaction, SinkInUse, as_cdc_error, complete_remedy
from cdc.log.reader import LogReader, log_exists

REPORT_EVERY: Final = 1.0
"""Seconds between two reports to the catalog."""
REQUESTS_EVERY: Final = 1.0
"""Seconds between two looks for requests of people in the catalog."""
IDLE: Final = BackOff(0.01, 0.05)
"""Pauses between two looks for new changes in the log; a look costs 0.2 ms in a local directory."""
QUIET_AFTER: Final = 200
"""Number of looks, about ten seconds, after which a delivery whose log has nothing new looks less often."""
QUIET: Final = 0.2
"""Seconds between two looks then."""
ALIVE_EVERY: Final = 2.5
"""Minimum seconds between two reports to the catalog while nothing changes; one is due every three seconds."""
FAILED: Final = BackOff(0.2, 30.0, jitter=0.2)
"""Pauses between two attempts to open a destination."""
LOG_POLL: Final = 0.1
"""Seconds between two checks whether the log exists."""
STOPPED_POLL: Final = 0.5
"""Seconds between two checks whether every delivery has stopped."""
END_POLL: Final = 0.02
"""Seconds between two checks whether every delivery has ended."""
END_WITHIN: Final = 20.0
"""Seconds for which a process that ends waits for destinations; what they have not acknowledged is sent again."""

log = structlog.get_logger("deliver")


class DeliveryRunner(Thread):
    """Runs the loop of one delivery until `stop` is set; failures that a retry may fix are retried for ever.

    After any other failure the runner waits for a request to its delivery, such as a rewind, and then tries again.
    """

    def __init__(self, definition: Definition, settings: Delivery, catalog: Catalog, stop: Event) -> None:
        # a thread that waits for a pipe or a broker does not keep the process alive
        super().__init__(name=f"deliver {settings.name}", daemon=True)
        self._definition = definition
        self._settings = settings
        self._catalog = catalog
        self._stop_requested = stop
        self.process_metrics = metrics.Metrics()
        self.figures = DeliveryFigures(definition.name, settings.name, self.process_metrics)
        self._requests = DeliveryRequests(catalog, definition.name, settings.name)
        self.failure: CdcError | None = None
        """Error because of which the delivery has stopped; None while it runs."""
        self.has_lost_output = False
        """True if the reader of standard output has closed it; the process then ends."""

    def run(self) -> None:
        """Open the delivery and send, again and again."""
        failures = 0
        while not self._stop_requested.is_set():
            began = time.monotonic()
            try:
                self._deliver()
            except BrokenPipeError:
                self.has_lost_output = True
                self._stop_requested.set()
            except Exception as exc:  # noqa: BLE001 - whatever fails, the delivery reports it and may be tried again
                failures = 1 if time.monotonic() - began > FAILED.longest else failures + 1
                self._recover(exc, failures)

    def _recover(self, exc: Exception, failures: int) -> None:
        """Wait until the delivery should be tried again."""
        if not isinstance(exc, CdcError):
            log.error("a delivery failed unexpectedly", delivery=self._settings.name, exc_info=exc)
        error = as_cdc_error(exc, f"delivery {self._settings.name!r}")
        error.fix = complete_remedy(error.fix, sink=self._settings.name)
        self.figures.record_failure(error)
        if error.reaction is Reaction.RETRY or isinstance(error, SinkInUse):
            self._log_failure("a delivery is interrupted and will be tried again", error)
            self._stop_requested.wait(FAILED.seconds(failures))
            return
        self._log_failure("a delivery stopped; it is tried again after a request to it", error)
        self.failure = error
        if self._requests.await_any(self._stop_requested):
            self.failure = None

    def _deliver(self) -> None:
        """Send until `stop` is set or something fails."""
        definition, settings = self._definition, self._settings
        log_reader = self._await_log()
        if log_reader is None:
            return
        conflict = f"another process sends delivery {settings.name!r}"
        with ExitStack() as stack:
            stack.enter_context(leased(self._catalog, f"deliver {definition.name}.{settings.name}", conflict))
            self._send(stack.enter_context(opened_delivery(definition, settings, log_reader, self.figures)), log_reader)

    def _send(self, opened: OpenedDelivery, log_reader: LogReader) -> None:
        loop = opened.loop
        idle = 0
        requests_due = 0.0
        while not self._stop_requested.is_set():
            if time.monotonic() >= requests_due:
                self._requests.answer(loop)
                requests_due = time.monotonic() + REQUESTS_EVERY
                self.figures.record_notice(self._requests.pause_notice())
            loop.check_stored()
            check_progress(loop.progress, log_reader.log_id, self._settings)
            opened.registration.report(loop.stored.needed, log_reader.pinned_version(loop.stored.position))
            if self._requests.is_paused:
                self._stop_requested.wait(REQUESTS_EVERY)
            elif loop.step():
                idle = 0
            else:
                idle += 1
                self._stop_requested.wait(IDLE.seconds(idle) if idle < QUIET_AFTER else QUIET)
        opened.registration.report(loop.stored.needed, log_reader.pinned_version(loop.stored.position), at_once=True)

    def _await_log(self) -> LogReader | None:
        """Return a reader of the log, as soon as it exists; None if the process ends before."""
        root = self._definition.log_of(self._settings)
        while not self._stop_requested.is_set():
            if log_exists(root):
                return LogReader(root)
            self._stop_requested.wait(LOG_POLL)
        return None

    def _log_failure(self, event: str, error: CdcError) -> None:
        log.warning(event, delivery=self._settings.name, code=error.code, message=error.message, remedy=error.fix)


class DeliveryReporter(Thread):
    """Writes the state of the process and of its deliveries to the catalog, until `ended` is set, then once more."""

    def __init__(self, catalog: Catalog, pipeline: str, runners: Sequence[DeliveryRunner], ended: Event) -> None:
        super().__init__(name="report")
        self._catalog = catalog
        self._pipeline = pipeline
        self._runners = runners
        self._ended = ended
        self._recorded = RecordedProgress[SinkProgress]()
        self._mirrored: dict[str, tuple[DeadLetter, ...]] = {}
        self._reported: tuple[object, ...] = ()
        self._reported_at = 0.0
        self._continued_from: list[Any] | None = None
        """The figures of the earlier process; None before they were read."""

    def run(self) -> None:
        """Report every REPORT_EVERY seconds."""
        while True:
            is_last = self._ended.wait(REPORT_EVERY)
            try:
                self._report(is_last=is_last)
            except CdcError as exc:
                self._recorded.forget()
                log.warning(
                    "cannot write the progress of deliveries to the catalog; they continue, but 'cdc status' is stale",
                    code=exc.code,
                    message=exc.message,
                )
            if is_last:
                return

    def _report(self, *, is_last: bool) -> None:
        progress = [found for runner in self._runners if (found := runner.figures.progress()) is not None]
        self._report_process(progress, is_last=is_last)
        for found in self._recorded.due(progress, time.monotonic()):
            self._catalog.sinks.record(self._pipeline, found)
        for runner in self._runners:
            letters = runner.figures.dead_letters()
            if letters != self._mirrored.get(runner.figures.name, ()):
                self._catalog.dead_letters.mirror(self._pipeline, runner.figures.name, letters)
                self._mirrored[runner.figures.name] = letters

    def _report_process(self, progress: Sequence[SinkProgress], *, is_last: bool) -> None:
        failure = next((runner.failure for runner in self._runners if runner.failure is not None), None)
        state = "running" if not is_last else "stopped" if failure is None else "failed"
        if self._continued_from is None:
            self._continued_from = self._catalog.processes.figures(self._pipeline, "deliver")
            for runner in self._runners:
                own = [figure for figure in self._continued_from if runner.figures.name in figure[1]]
                runner.process_metrics.continue_from(own)
        content = (state, failure, *((one.position, one.state) for one in progress))
        if content == self._reported and time.monotonic() - self._reported_at < ALIVE_EVERY:
            return
        self._catalog.processes.report(
            ProcessReport(
                pipeline=self._pipeline,
                process="deliver",
                pid=os.getpid(),
                state=state,
                error=None if failure is None else failure.to_json(),
                figures=[figure for runner in self._runners for figure in runner.process_metrics.to_json()],
            )
        )
        self._reported, self._reported_at = content, time.monotonic()


def main(definition: Definition, deliveries: Sequence[Delivery]) -> int:
    """Send deliveries until SIGTERM or SIGINT; return 0. The same signal again ends the wait for destinations.

    Raises the error of a delivery once every one has stopped, and BrokenPipeError if the output was closed.
    """
    stop = Event()
    stop_now = Event()
    ended = Event()
    received = set[int]()

    def end(number: int, _frame: FrameType | None) -> None:
        if number in received:  # after ^C, 'cdc run' sends SIGTERM, which is another signal
            stop_now.set()
        received.add(number)
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    with Catalog.open(definition.catalog.url) as catalog:
        runners = [DeliveryRunner(definition, settings, catalog, stop) for settings in deliveries]
        reporter = DeliveryReporter(catalog, definition.name, runners, ended)
        for thread in (*runners, reporter):
            thread.start()
        failures = _await_end(runners, stop, stop_now)
        ended.set()
        reporter.join()
    if any(runner.has_lost_output for runner in runners):
        raise BrokenPipeError
    if failures:
        raise failures[0]
    return 0


def _await_end(runners: Sequence[DeliveryRunner], stop: Event, stop_now: Event) -> list[CdcError]:
    """Wait until `stop` is set or every delivery has stopped, and return the errors in the second case."""
    while not stop.wait(STOPPED_POLL):
        failures = [runner.failure for runner in runners if runner.failure is not None]
        if len(failures) == len(runners):
            stop.set()
            break
    else:
        failures = []
    deadline = time.monotonic() + END_WITHIN
    while any(runner.is_alive() for runner in runners) and time.monotonic() < deadline:
        if stop_now.wait(END_POLL):
            break
    return failures
