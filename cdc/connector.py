"""The connector process: one reader, its heartbeat, its reports to the catalog, and when to try again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Final

import structlog
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_when_event_set, wait_exponential_jitter
from tenacity.nap import sleep_using_event

from cdc import metrics
from cdc.catalog import Catalog, ProcessReport
from cdc.change import HEARTBEAT_PREFIX
from cdc.config import Definition
from cdc.errors import CdcError, Reaction
from cdc.log.segments import SegmentLimits
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres import heartbeat
from cdc.postgres.connection import connect
from cdc.postgres.replication import identify
from cdc.postgres.slot import slot_status
from cdc.reader import Reader, ReaderSettings
from cdc.snapshot.initial import CopySource

REPORT_EVERY: Final = 1.0
"""Seconds between reports; a process that is silent for five is shown as down."""

log = structlog.get_logger("reader")


def main(definition: Definition) -> int:
    """Run the reader until SIGTERM or SIGINT; raises the error that a retry cannot mend."""
    stop = Event()

    def drain(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    figures = metrics.Figures()
    reporter = Reporter(definition, figures, stop)
    reporter.start()
    try:
        Retrying(
            retry=retry_if_exception(lambda exc: isinstance(exc, CdcError) and exc.reaction is Reaction.RETRY),
            wait=wait_exponential_jitter(initial=0.2, max=30),
            stop=stop_when_event_set(stop),
            sleep=sleep_using_event(stop),
            before_sleep=reporter.waiting,
            reraise=True,
        )(_run, definition, figures, stop, reporter)
    except CdcError as exc:
        if stop.is_set() and exc.reaction is Reaction.RETRY:
            return 0
        reporter.failed(exc)
        raise
    finally:
        stop.set()
        reporter.join()
    return 0


def _run(definition: Definition, figures: metrics.Figures, stop: Event, reporter: Reporter) -> None:
    settings = reader_settings(definition, identify(definition.source.dsn.reveal()).timeline)
    reporter.running()
    Reader(settings, figures, stop).run()


def reader_settings(definition: Definition, timeline: int) -> ReaderSettings:
    """The reader's part of a definition."""
    source = definition.source
    return ReaderSettings(
        source=CopySource(
            pipeline=definition.name,
            dsn=source.dsn.reveal(),
            slot=source.slot.name,
            publication=source.publication.name,
            patterns=definition.patterns,
            exclude=definition.excludes,
            timeline=timeline,
        ),
        log=Path(definition.log.path),
        limits=SegmentLimits(size=definition.log.segment.bytes, age=definition.log.segment.every),
        commit_bytes=definition.log.commit.bytes,
        linger=definition.log.commit.linger,
    )


class Reporter(Thread):
    """Tells the catalog what the reader does, watches the slot, and sends heartbeats to an idle source."""

    def __init__(self, definition: Definition, figures: metrics.Figures, stop: Event) -> None:
        super().__init__(name="reporter")
        self._definition, self._figures, self._stop_event = definition, figures, stop
        self._state, self._error = "starting", None
        self._beat_due = time.monotonic() + definition.source.heartbeat

    def running(self) -> None:
        """The reader streams or copies."""
        self._state, self._error = "running", None

    def waiting(self, attempt: RetryCallState) -> None:
        """The reader failed and will try again."""
        exc = attempt.outcome.exception() if attempt.outcome else None
        assert isinstance(exc, CdcError)  # noqa: S101 - only those are retried
        self._figures.add(metrics.RECONNECTS, 1, self._definition.name)
        self._tell("waiting", exc)

    def failed(self, exc: CdcError) -> None:
        """The reader failed for good."""
        self._tell("failed", exc)

    def run(self) -> None:
        """Report until stop is set, and once more after it."""
        with Catalog.open(self._definition.catalog.url) as catalog:
            while True:
                stopping = self._stop_event.wait(REPORT_EVERY)
                self._look_at_source()
                state = "stopped" if stopping and self._error is None else self._state
                try:
                    catalog.processes.report(
                        ProcessReport(
                            pipeline=self._definition.name,
                            process="reader",
                            pid=os.getpid(),
                            state=state,
                            error=self._error,
                            figures=self._figures.to_json(),
                        )
                    )
                except CdcError as exc:
                    log.warning("catalog is unreachable", code=exc.code)
                if stopping:
                    return

    def _tell(self, state: str, exc: CdcError) -> None:
        self._state = state
        self._error = {"code": exc.code, "message": exc.message, "suggestion": exc.fix}
        self._figures.add(metrics.ERRORS, 1, self._definition.name, "reader", exc.code)
        log.warning("reader stopped", state=state, code=exc.code, message=exc.message, fix=exc.fix)

    def _look_at_source(self) -> None:
        source, name = self._definition.source, self._definition.name
        durable = next((s.value for s in self._figures if s.metric is metrics.LOG_POSITION), None)
        if self._state != "running" or self._stop_event.is_set():
            return
        try:
            with connect(source.dsn.reveal(), application_name="cdc reporter") as conn:
                if source.heartbeat and time.monotonic() >= self._beat_due:
                    heartbeat.emit(conn, HEARTBEAT_PREFIX, name)
                    self._beat_due = time.monotonic() + source.heartbeat
                slot = slot_status(conn, source.slot.name)
        except CdcError as exc:
            log.warning("source is unreachable", code=exc.code)
            return
        if slot is None:
            return
        self._figures.set(metrics.SLOT_RETAINED, slot.retained_bytes, name)
        if durable is not None and slot.wal_end is not None:
            behind = max(0, slot.wal_end - Lsn(Position(int(durable)).lsn))
            self._figures.set(metrics.SOURCE_LAG_BYTES, behind, name, "durable")
        if slot.confirmed_flush is not None and slot.wal_end is not None:
            self._figures.set(metrics.SOURCE_LAG_BYTES, max(0, slot.wal_end - slot.confirmed_flush), name, "confirmed")
