"""The delivery process: one thread per delivery, its requests, its reports, and the way the process ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from threading import Event, Thread
from types import FrameType
from typing import Final

import structlog

from cdc import metrics
from cdc.back_off import BackOff
from cdc.catalog import Catalog, DeadLetter, ProcessReport, RecordedProgress, SinkProgress
from cdc.catalog.process_lease import leased
from cdc.config import Definition
from cdc.config.destinations import Delivery
from cdc.delivery.delivery_figures import DeliveryFigures
from cdc.delivery.delivery_loop import DeliveryLoop, check_limit
from cdc.delivery.delivery_requests import DeliveryRequests
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.event_source import EventSource
from cdc.delivery.formats import new_format
from cdc.delivery.formats.event_rows import SourceNames
from cdc.delivery.progress import ProgressFile, delivery_uuid
from cdc.errors import CdcError, LogError, Reaction, SinkInUse, as_cdc_error
from cdc.log.consumer_registration import ConsumerRegistration
from cdc.log.reader import LogReader
from cdc.position import Position

REPORT_EVERY: Final = 0.5
"""Seconds between two reports to the catalog."""
REQUESTS_EVERY: Final = 0.5
"""Seconds between two looks for requests of people in the catalog."""
IDLE: Final = BackOff(0.01, 0.05)
"""Pauses between two looks for new changes in the log; a look costs 0.1 ms in a local directory."""
FAILED: Final = BackOff(0.2, 30.0, jitter=0.2)
"""Pauses between two attempts to open a destination."""
LOG_POLL: Final = 0.1
"""Seconds between two checks whether the log exists."""

log = structlog.get_logger("deliver")


class DeliveryRunner(Thread):
    """Runs the loop of one delivery until `stop` is set; failures that a retry may fix are retried for ever."""

    def __init__(self, definition: Definition, settings: Delivery, catalog: Catalog, stop: Event) -> None:
        super().__init__(name=f"deliver {settings.name}")
        self._definition, self._settings, self._catalog, self._stop_requested = definition, settings, catalog, stop
        self.process_metrics = metrics.Metrics()
        self.figures = DeliveryFigures(definition.name, settings.name, self.process_metrics)
        self._requests = DeliveryRequests(catalog, definition.name, settings.name)
        self.failure: CdcError | None = None
        """Error because of which the delivery has stopped; None while it runs."""

    def run(self) -> None:
        """Open the delivery and send, again and again."""
        failures = 0
        while not self._stop_requested.is_set():
            began = time.monotonic()
            try:
                self._deliver()
            except CdcError as exc:
                self.figures.record_failure(exc)
                if exc.reaction is not Reaction.RETRY and not isinstance(exc, SinkInUse):
                    self.failure = exc
                    self._log_failure("a delivery stopped", exc)
                    return
                failures = 1 if time.monotonic() - began > FAILED.longest else failures + 1
                self._log_failure("a delivery is interrupted and will be tried again", exc)
                self._stop_requested.wait(FAILED.seconds(failures))
            except Exception as exc:
                log.exception("a delivery stopped", delivery=self._settings.name)
                self.failure = as_cdc_error(exc, f"delivery {self._settings.name!r}")
                self.figures.record_failure(self.failure)
                return

    def _deliver(self) -> None:
        """Send until `stop` is set or something fails."""
        definition, settings = self._definition, self._settings
        found = self._await_log()
        if found is None:
            return
        identity = DeliveryIdentity(definition.name, settings.name, found.log_id)
        names = SourceNames(definition.name, found.identity.database, version("cdc"), found.log_id)
        conflict = f"another process sends delivery {settings.name!r}"
        with ExitStack() as stack:
            stack.enter_context(leased(self._catalog, f"deliver {identity}", conflict))
            source = EventSource(found, settings, identity, new_format(settings, names))
            stack.callback(source.close)
            store = ProgressFile(definition.log.root, found.log_id, settings.name)
            loop = DeliveryLoop(found, source, new_destination(settings, identity), store, self.figures)
            stack.callback(loop.close)
            loop.open(settings)
            registered = ConsumerRegistration(
                definition.log.root, delivery_uuid(found.log_id, settings.name), settings.name
            )
            self._send(loop, found, registered)

    def _send(self, loop: DeliveryLoop, found: LogReader, registered: ConsumerRegistration) -> None:
        idle, requests_due = 0, 0.0
        while not self._stop_requested.is_set():
            check_limit(loop.progress, self._settings)
            registered.report(loop.progress.needed, _pinned(found, loop.progress.position))
            if time.monotonic() >= requests_due:
                requests_due = time.monotonic() + REQUESTS_EVERY
                self._requests.answer(loop)
                self.figures.record_notice(self._requests.pause_notice())
            if self._requests.is_paused:
                self._stop_requested.wait(REQUESTS_EVERY)
            elif loop.step():
                idle = 0
            else:
                idle += 1
                self._stop_requested.wait(IDLE.seconds(idle))

    def _await_log(self) -> LogReader | None:
        """Return a reader of the log, as soon as it exists; None if the process ends before."""
        while not self._stop_requested.is_set():
            try:
                return LogReader(self._definition.log.root)
            except LogError as exc:
                if type(exc) is not LogError:  # the base class: the reader has not created the log yet
                    raise
            self._stop_requested.wait(LOG_POLL)
        return None

    def _log_failure(self, event: str, error: CdcError) -> None:
        log.warning(event, delivery=self._settings.name, code=error.code, message=error.message, remedy=error.fix)


class DeliveryReporter(Thread):
    """Writes the state of the process and of its deliveries to the catalog, until `ended` is set, then once more."""

    def __init__(self, catalog: Catalog, pipeline: str, runners: Sequence[DeliveryRunner], ended: Event) -> None:
        super().__init__(name="report")
        self._catalog, self._pipeline, self._runners, self._ended = catalog, pipeline, runners, ended
        self._recorded = RecordedProgress[SinkProgress]()
        self._mirrored: dict[str, tuple[DeadLetter, ...]] = {}

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
        failure = next((runner.failure for runner in self._runners if runner.failure is not None), None)
        figures = [figure for runner in self._runners for figure in runner.process_metrics.to_json()]
        self._catalog.processes.report(
            ProcessReport(
                pipeline=self._pipeline,
                process="deliver",
                pid=os.getpid(),
                state="running" if not is_last else "stopped" if failure is None else "failed",
                error=None if failure is None else failure.to_json(),
                figures=figures,
            )
        )
        progress = [found for runner in self._runners if (found := runner.figures.progress()) is not None]
        for found in self._recorded.due(progress, time.monotonic()):
            self._catalog.sinks.record(self._pipeline, found)
        for runner in self._runners:
            letters = runner.figures.dead_letters()
            if letters != self._mirrored.get(runner.figures.name, ()):
                self._catalog.dead_letters.mirror(self._pipeline, runner.figures.name, letters)
                self._mirrored[runner.figures.name] = letters


def main(definition: Definition, deliveries: Sequence[Delivery]) -> int:
    """Send deliveries until SIGTERM or SIGINT; return 0. Raises the error of a delivery once every one has stopped."""
    stop, ended = Event(), Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    with Catalog.open(definition.catalog.url) as catalog:
        runners = [DeliveryRunner(definition, settings, catalog, stop) for settings in deliveries]
        reporter = DeliveryReporter(catalog, definition.name, runners, ended)
        for thread in (*runners, reporter):
            thread.start()
        for runner in runners:
            runner.join()
        ended.set()
        reporter.join()
    failures = [runner.failure for runner in runners if runner.failure is not None]
    if failures and len(failures) == len(runners):
        raise failures[0]
    return 0


def _pinned(found: LogReader, position: Position) -> int | None:
    """Return the version of `compacted` that the delivery reads; None if it needs only `changes`."""
    return found.compacted.version if found.compacted is not None and position < found.oldest else None
