"""The thread of the apply process that keeps the views up to date: it follows the cuts of the sink that they read."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread
from typing import Final

import structlog
from pyspark.sql import SparkSession

from cdc.back_off import BackOff
from cdc.capture.settings import reader_settings, retention_of
from cdc.catalog import Catalog
from cdc.catalog.view_requests import ViewRequests, take_requests
from cdc.config import Definition
from cdc.config.views import NAME_OF_VIEWS
from cdc.errors import CdcError, as_cdc_error
from cdc.log.consumer_registration import ConsumerRegistration
from cdc.log.disk_format import LogIdentity
from cdc.log.maintenance_worker import RetentionWorker
from cdc.log.reader import LogReader
from pipelines.runtime.sink_lease import SinkLeases
from pipelines.runtime.sink_status_reporter import ProgressReporter, SinkFigures
from pipelines.views.input_cuts import InputCuts
from pipelines.views.log_of_views import LogOfViews
from pipelines.views.view_engine import ViewEngine
from pipelines.views.view_report import ViewReport

CUT_POLL: Final = 0.2
"""Seconds for which the thread waits for a cut before it looks whether it should end."""
ASK_EVERY: Final = 1.0
"""Seconds between two looks for requests in the catalog."""
FAILED: Final = BackOff(0.5, 30.0)
"""Pauses between attempts after an error that is not that of one view."""
log = structlog.get_logger("views")


@dataclass(frozen=True, slots=True)
class ViewServices:
    """What the thread needs of its process."""

    session: Callable[[], SparkSession]
    """Starts Spark, if necessary, and returns its session."""
    leases: SinkLeases
    report: ViewReport
    requests: Callable[[], ViewRequests]
    """Returns what people ask of the views."""


class ViewWorker(Thread):
    """Computes the views of a definition until `stop` is set. Errors are logged, and the views are tried again."""

    def __init__(self, definition: Definition, cuts: InputCuts, services: ViewServices, stop: Event) -> None:
        super().__init__(name=NAME_OF_VIEWS, daemon=True)
        self._definition = definition
        self._cuts = cuts
        self._services = services
        self._end = stop
        self._is_upkeep_due = Event()

    def run(self) -> None:
        """Follow the sink; after an error, begin again."""
        failures = 0
        while not self._end.is_set():
            if not self._services.leases.try_acquire(NAME_OF_VIEWS):
                self._end.wait(FAILED.seconds(1))
                continue
            try:
                self._follow()
                return
            except Exception as exc:
                failures += 1
                error = as_cdc_error(exc, NAME_OF_VIEWS)
                if self._end.is_set():
                    return
                self._services.report.failed(error)
                log.warning(
                    "cannot compute the views; the sinks continue, and the views are tried again",
                    code=error.code,
                    message=error.message,
                    exc_info=None if isinstance(exc, CdcError) else exc,
                )
                self._end.wait(FAILED.seconds(failures))

    def _follow(self) -> None:
        definition = self._definition
        sink = definition.sink_of_view_inputs
        assert sink is not None  # noqa: S101 - the definition was checked
        change_log = LogReader(definition.log.root)
        views = open_log_of_views(definition, change_log)
        engine = ViewEngine(definition.views, sink, views, change_log, self._services.session().newSession())
        engine.on_slice = self._services.report.slice_done
        with closing(engine):
            self._follow_cuts(engine, views, change_log)

    def _follow_cuts(self, engine: ViewEngine, views: LogOfViews, change_log: LogReader) -> None:
        definition, last = self._definition, None
        registration = ConsumerRegistration(definition.log.root, _consumer_uuid(change_log.log_id), NAME_OF_VIEWS)
        with RetentionWorker(definition.log.of_views, retention_of(definition), self._is_upkeep_due.set) as upkeep:
            asked_at = 0.0
            while not self._end.is_set():
                if time.monotonic() - asked_at >= ASK_EVERY:
                    self._follow_requests(engine)
                    asked_at = time.monotonic()
                oldest, source = engine.oldest_cut, change_log.last_commit
                registration.report(oldest, change_log.pinned_version(oldest))
                last = self._cuts.take(CUT_POLL) or last
                if last is not None and source is not None and engine.is_due(last):
                    self._services.report.start(last)
                    engine.advance(last, source.commit_source)
                    self._services.report.computed(last, engine.figures)
                self._cuts.keep(engine.cuts_in_use)
                if self._is_upkeep_due.is_set():
                    self._is_upkeep_due.clear()
                    upkeep.commit_prepared(views.writer)

    def _follow_requests(self, engine: ViewEngine) -> None:
        try:
            requests = self._services.requests()
            engine.paused = requests.paused
            for name in requests.refreshes:
                engine.refresh(name)
        except CdcError as exc:
            log.warning("cannot read requests for views from the catalog", code=exc.code, message=exc.message)


@contextmanager
def computed_views(
    definition: Definition, session: Callable[[], SparkSession], reporter: ProgressReporter, catalog: Catalog
) -> Iterator[InputCuts]:
    """Compute the views of a definition during the block; yield what takes the cuts of the tables that they read."""
    sink = definition.sink_of_view_inputs
    assert sink is not None  # noqa: S101 - the definition was checked
    cuts, ended = InputCuts(sink.name), Event()
    figures, leases = (
        SinkFigures(definition.name, NAME_OF_VIEWS, reporter.figures),
        SinkLeases(catalog, definition.name),
    )
    reporter.sinks.append(figures)
    requests = partial(take_requests, catalog, definition.name)
    services = ViewServices(session, leases, ViewReport(definition.name, figures, reporter.figures), requests)
    worker = ViewWorker(definition, cuts, services, ended)
    worker.start()
    try:
        yield cuts
    finally:
        ended.set()
        worker.join()
        leases.close()


def open_log_of_views(definition: Definition, change_log: LogReader) -> LogOfViews:
    """Open the log of views for writing; it is created if it does not exist."""
    identity = LogIdentity(system_id=change_log.system_id, database=change_log.identity.database)
    return LogOfViews(definition.log.of_views, identity, reader_settings(definition).limits)


def _consumer_uuid(log_id: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"cdc:{log_id}/{NAME_OF_VIEWS}"))
