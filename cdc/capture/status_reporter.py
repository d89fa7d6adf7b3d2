"""Reporter: tells the catalog what the reader does, watches the slot, and sends heartbeats to an idle source.

The last report is made by `end`, which the main thread calls once it knows the outcome: not when `stop` is set, for
that happens before a failure is known, nor by the thread that asks the source, which may wait for an answer.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from threading import Event, Lock, Thread
from typing import Any, Final

import structlog
from tenacity import RetryCallState

from cdc import metrics
from cdc.capture.error_location import ERRORS_WITH_POSITIONS, add_positions
from cdc.capture.reader import ReaderStart
from cdc.capture.resume_checks import captured_oids, check_publication
from cdc.capture.table_status import inexact_tables
from cdc.catalog import Catalog, ProcessReport, TableProgress
from cdc.change import HEARTBEAT_PREFIX
from cdc.config import Definition
from cdc.config.definition import OnWalBudget
from cdc.errors import CdcError, LogError, LogUnwritable, SlotInUse, SourceError, WalBudgetExceeded
from cdc.log.reader import LogReader
from cdc.postgres import heartbeat
from cdc.postgres.connection import ANSWER_TIMEOUT, connect
from cdc.postgres.slot import SlotStatus, slot_status
from cdc.postgres.source_identity import publication_status

CHECK_PUBLICATION_EVERY: Final = 5.0
"""Seconds."""
READ_SCHEMAS_EVERY: Final = 5.0
"""Seconds between two readings of the log's `s` rows, which stand in files of their own."""
BUDGET_WARNING: Final = 0.8
"""Share of the WAL budget from which on it is spoken of."""
LAST_REPORT_WITHIN: Final = 5.0
"""Seconds to wait for it."""
SLOT_IN_USE_EVERY: Final = 60.0
"""Seconds between two log lines of a reader that waits for the same other reader, which it asks for every second."""
REPORT_EVERY: Final = 1.0
"""Seconds between reports; a process that is silent for five is shown as down."""

SLOW_COMPILE: Final = 2.0
"""Seconds from which on somebody wonders what a start does; to load a decoder that is compiled takes less."""

log = structlog.get_logger("reader")


class StatusReporter(Thread):
    """Runs beside the reader until its end; a source or a catalog that is away is logged and asked again."""

    def __init__(self, definition: Definition, figures: metrics.Metrics, stop: Event) -> None:
        super().__init__(name="reporter", daemon=True)
        self._definition, self._figures, self._stop_event = definition, figures, stop
        self._state, self._last = "starting", "stopped"
        self._error: dict[str, str] | None = None
        self._beat_due = time.monotonic() + definition.source.heartbeat
        self._catalog: Catalog | None = None
        self._ended, self._reporting = Event(), Lock()
        self._source: Any = None
        self._primary: Any = None
        self._open = ExitStack()
        self._captured: list[int] | None = None
        self._publication_due = 0.0
        self._warned = False
        self._in_use: str | None = None
        self._in_use_due = 0.0
        self._copied_before: dict[str, int] = {}
        self._waiting_since: float | None = None
        self._marks: list[TableProgress] = []
        self._marks_due = 0.0
        self._view: LogReader | None = None
        self.verdict: CdcError | None = None
        """Why the reader was told to stop from here; None as long as nothing was found."""

    def running(self) -> None:
        """The reader streams or copies."""
        self._state, self._error = "running", None
        self._captured = None

    def started(self, start: ReaderStart) -> None:
        """The reader streams."""
        if start.copied is not None:
            made = start.copied
            log.info("copied", position=str(made.position), tables=made.tables, rows=made.rows, later=made.later)
        if start.compile_seconds > SLOW_COMPILE:
            log.info("compiled the decoder, for later starts too", seconds=round(start.compile_seconds, 1))
        if self._waiting_since is None:
            log.info("streaming", position=str(start.position))
        else:
            seconds = round(time.monotonic() - self._waiting_since, 1)
            log.info("connected again", position=str(start.position), after_seconds=seconds)
        self._waiting_since = None

    def copied(self) -> None:
        """The reader is about to end, for it was there for the copy alone."""
        self._last = "copied"

    def waiting(self, attempt: RetryCallState) -> None:
        """The reader failed and will try again."""
        exc = attempt.outcome.exception() if attempt.outcome else None
        assert isinstance(exc, CdcError)  # noqa: S101 - only those are retried
        self._figures.add(metrics.RECONNECTS, 1, self._definition.name)
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        self._tell("waiting", exc)

    def failed(self, exc: CdcError) -> None:
        """The reader failed for good."""
        if exc is not self.verdict:  # that one is recorded already
            self._tell("failed", exc)

    def gave_up(self, exc: CdcError) -> None:
        """The reader was stopped before it could try again after this failure."""
        if self._error != exc.to_json():
            self._tell("stopped", exc)

    def end(self) -> None:
        """Make the last report: `stopped` or `copied`, or `failed`; with the last error, whatever it was.

        A catalog that does not answer in time does not get it.
        """
        self._ended.set()
        last = Thread(target=self._report_last, name="last report", daemon=True)
        last.start()
        last.join(LAST_REPORT_WITHIN)

    def run(self) -> None:
        """Report until the end."""
        with self._open:
            while not self._ended.wait(REPORT_EVERY):
                if not self._stop_event.is_set():
                    self._look_at_source()
                    self._look_at_log()
                self._report(self._state)

    def _report_last(self) -> None:
        with self._reporting:
            self._send("failed" if self._state == "failed" else self._last)
            if self._catalog is not None:
                self._catalog.close()

    def _look_at_log(self) -> None:
        """Show that the reader waits for its storage, and that it no longer does."""
        blocked = bool(self._figures.value(metrics.LOG_BLOCKED, self._definition.name))
        if blocked and self._state == "running":
            self._tell("waiting", LogUnwritable("the log's storage takes no more"))
        elif not blocked and self._error is not None and self._error["code"] == LogUnwritable.code:
            self._state, self._error = "running", None

    def _tell(self, state: str, exc: CdcError) -> None:
        self._error = exc.to_json()
        self._state = state
        self._figures.add(metrics.ERRORS, 1, self._definition.name, "reader", exc.code)
        if isinstance(exc, SlotInUse):
            if exc.message == self._in_use and time.monotonic() < self._in_use_due:
                return
            self._in_use, self._in_use_due = exc.message, time.monotonic() + SLOT_IN_USE_EVERY
        log.warning("reader stopped", state=state, code=exc.code, message=exc.message, fix=exc.fix)

    def _report(self, state: str) -> None:
        with self._reporting:
            if not self._ended.is_set():  # nothing may follow the last report
                self._send(state)

    def _send(self, state: str) -> None:
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
                self._catalog = Catalog.open(self._definition.catalog.url)
                known = self._catalog.tables.ls(name)
                self._copied_before = {table.topic: table.rows for table in known if not table.sink}
            self._catalog.processes.report(report)
            if tables := self._tables(self._catalog):
                self._catalog.tables.record(name, tables)
        except CdcError as exc:
            log.warning("catalog is unreachable", code=exc.code)

    def _tables(self, catalog: Catalog) -> list[TableProgress]:
        """The tables that this process copied, and those that the log marks."""
        position = self._figures.value(metrics.LOG_POSITION, self._definition.name)
        if position is not None and time.monotonic() >= self._marks_due:
            self._marks_due = time.monotonic() + READ_SCHEMAS_EVERY
            with suppress(LogError):  # the first copy has not begun
                known = self._held().schemas()
                shown = [*self._copied(), *catalog.tables.ls(self._definition.name)]
                self._marks = inexact_tables(known.values(), shown, int(position))
        marked = {table.topic for table in self._marks}
        return [*(table for table in self._copied() if table.topic not in marked), *self._marks]

    def _copied(self) -> list[TableProgress]:
        """The tables of which this process copied rows; those that the catalog had before are added to them."""
        position = self._figures.value(metrics.LOG_POSITION, self._definition.name)
        return [
            TableProgress(
                sink="",
                topic=sample.labels[1],
                state="snapshotting" if position is None else "streaming",
                reason=None,
                position=int(position or 0),
                version=None,
                rows=int(sample.value) + self._copied_before.get(sample.labels[1], 0),
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
                self._source = connect(source.current_dsn(), application_name="cdc reporter", patience=ANSWER_TIMEOUT)
                self._open.callback(self._source.close)
            if source.heartbeat and time.monotonic() >= self._beat_due:
                self._beat()
                self._beat_due = time.monotonic() + source.heartbeat
            if time.monotonic() >= self._publication_due:
                self._publication_due = time.monotonic() + CHECK_PUBLICATION_EVERY
                self._look_at_publication()
            slot = slot_status(self._source, source.slot.name)
        except CdcError as exc:
            self._source = self._primary = None
            log.warning("source is unreachable", code=exc.code)
            return
        if slot is not None:
            self._budget(slot)

    def _beat(self) -> None:
        """Send a heartbeat: to the source, or where that is a standby to its primary, if there is a DSN for it."""
        source = self._definition.source
        if source.primary is None:
            if not heartbeat.is_standby(self._source):
                heartbeat.emit_message(self._source, HEARTBEAT_PREFIX, self._definition.name)
            return
        if self._primary is None:
            self._primary = connect(source.current_primary(), application_name="cdc heartbeat", patience=ANSWER_TIMEOUT)
            self._open.callback(self._primary.close)
        heartbeat.emit_message(self._primary, HEARTBEAT_PREFIX, self._definition.name)
        heartbeat.log_standby_snapshot(self._primary)

    def _look_at_publication(self) -> None:
        """From version 18 on the server goes on without a publication and sends nothing of what it would have sent."""
        try:
            known = self._held()
        except LogError:
            return  # the first copy has not begun
        last = known.last_commit
        if last is None or not last.publication:
            return
        if self._captured is None:
            self._captured = captured_oids(known.schemas())
        found = publication_status(self._source, self._definition.source.publication.name, self._captured)
        try:
            check_publication(last, found)
        except SourceError as exc:
            self._halt(exc)

    def _held(self) -> LogReader:
        """The log as it is now: opening it costs ten times as much as a refresh. Raises LogError if there is none."""
        if self._view is None:
            self._view = LogReader(self._definition.log.root)
        self._view.refresh()
        return self._view

    def _budget(self, slot: SlotStatus) -> None:
        source = self._definition.source
        if source.wal_budget is None or slot.retained_bytes < source.wal_budget * BUDGET_WARNING:
            self._warned = False
            return
        over = slot.retained_bytes > source.wal_budget
        kept = (
            f"the server keeps {slot.retained_bytes} bytes of WAL for slot {slot.name!r} of {source.wal_budget} allowed"
        )
        if over and source.on_wal_budget is OnWalBudget.STOP:
            self._halt(WalBudgetExceeded(kept))
        elif not self._warned:
            self._warned = True
            log.warning("WAL budget is nearly used up" if not over else "WAL budget is exceeded", message=kept)

    def _halt(self, found: CdcError) -> None:
        """Stop the reader; what is durable by then stays."""
        verdict = add_positions(found, self._definition) if isinstance(found, ERRORS_WITH_POSITIONS) else found
        if self.verdict is None:
            self.verdict = verdict
            self._tell("failed", verdict)
        self._stop_event.set()
