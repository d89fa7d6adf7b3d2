"""Reporter: tells the catalog what the reader does, watches the slot, and sends heartbeats to an idle source."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from threading import Event, Thread
from typing import Any, Final

import structlog
from tenacity import RetryCallState

from cdc import metrics
from cdc.catalog import Catalog, ProcessReport, TableProgress
from cdc.change import HEARTBEAT_PREFIX
from cdc.config import Definition
from cdc.errors import CdcError
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres import heartbeat
from cdc.postgres.connection import connect
from cdc.postgres.slot import SlotStatus, slot_status

REPORT_EVERY: Final = 1.0
"""Seconds between reports; a process that is silent for five is shown as down."""

log = structlog.get_logger("reader")


class Reporter(Thread):
    """Runs beside the reader until stop is set; a source or a catalog that is away is logged and asked again."""

    def __init__(self, definition: Definition, figures: metrics.Figures, stop: Event) -> None:
        super().__init__(name="reporter")
        self._definition, self._figures, self._stop_event = definition, figures, stop
        self._state = "starting"
        self._error: dict[str, str] | None = None
        self._beat_due = time.monotonic() + definition.source.heartbeat
        self._catalog: Catalog | None = None
        self._source: Any = None
        self._open = ExitStack()

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
        with self._open:
            while not self._stop_event.wait(REPORT_EVERY):
                self._look_at_source()
                self._report(self._state)
            self._report(self._state if self._error else "stopped")

    def _tell(self, state: str, exc: CdcError) -> None:
        self._error = {"code": exc.code, "message": exc.message, "suggestion": exc.fix}
        self._state = state
        self._figures.add(metrics.ERRORS, 1, self._definition.name, "reader", exc.code)
        log.warning("reader stopped", state=state, code=exc.code, message=exc.message, fix=exc.fix)

    def _report(self, state: str) -> None:
        name = self._definition.name
        report = ProcessReport(
            pipeline=name,
            process="reader",
            pid=os.getpid(),
            state=state,
            error=self._error,
            figures=self._figures.to_json(),
        )
        try:
            if self._catalog is None:
                self._catalog = self._open.enter_context(Catalog.open(self._definition.catalog.url))
            self._catalog.processes.report(report)
            if copied := self._copied():
                self._catalog.tables.record(name, copied)
        except CdcError as exc:
            log.warning("catalog is unreachable", code=exc.code)

    def _copied(self) -> list[TableProgress]:
        """The tables that this process copied; their rows of before a restart stand in the catalog already."""
        position = self._figures.value(metrics.LOG_POSITION, self._definition.name)
        return [
            TableProgress(
                sink="",
                topic=sample.labels[1],
                state="snapshotting" if position is None else "streaming",
                reason=None,
                position=int(position or 0),
                version=None,
                rows=int(sample.value),
            )
            for sample in self._figures
            if sample.metric is metrics.SNAPSHOT_ROWS
        ]

    def _look_at_source(self) -> None:
        source = self._definition.source
        if self._state != "running":
            return
        try:
            if self._source is None:
                self._source = connect(source.dsn.reveal(), application_name="cdc reporter")
                self._open.callback(self._source.close)
            if source.heartbeat and time.monotonic() >= self._beat_due:
                heartbeat.emit(self._source, HEARTBEAT_PREFIX, self._definition.name)
                self._beat_due = time.monotonic() + source.heartbeat
            slot = slot_status(self._source, source.slot.name)
        except CdcError as exc:
            self._source = None
            log.warning("source is unreachable", code=exc.code)
            return
        if slot is not None:
            self._measure(slot)

    def _measure(self, slot: SlotStatus) -> None:
        name, figures = self._definition.name, self._figures
        figures.set(metrics.SLOT_RETAINED, slot.retained_bytes, name)
        durable = figures.value(metrics.LOG_POSITION, name)
        points = {"durable": None if durable is None else Position(int(durable)).lsn, "confirmed": slot.confirmed_flush}
        for point, lsn in points.items():
            if lsn is not None:
                figures.set(metrics.SOURCE_LAG_BYTES, max(0, slot.wal_end - Lsn(lsn)), name, point)
