"""Status reporter: writes the reader's state to the catalog, watches slot and publication, and sends heartbeats.

The main thread calls `close`, which writes the last report, once it knows how the reader ended. The reporter's own
thread cannot write that report: it may be waiting for the source, and `stop` is set before a failure is known.

The reporter adds the positions of slot and log to errors that end the stream. To advance the slot or begin an epoch, an
operator needs the slot's name, both positions, and a command with an LSN. The server's message contains none of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import Event, Lock, Thread
from typing import Any, Final, TypeVar

import structlog
from tenacity import RetryCallState

from cdc import metrics
from cdc.capture.reader import ReaderStart
from cdc.capture.resume_checks import captured_oids, check_publication
from cdc.catalog import REFUSED, Catalog, ProcessReport, TableProgress
from cdc.config import Definition
from cdc.config.source import OnWalBudget
from cdc.errors import (
    CdcError,
    LogError,
    LogUnwritable,
    PublicationMissing,
    PublicationNarrowed,
    PublicationReplaced,
    SlotInUse,
    SourceError,
    UndecodableWal,
    WalBudgetExceeded,
)
from cdc.log.reader import LogReader
from cdc.log_row import HEARTBEAT_PREFIX
from cdc.postgres.connection import ANSWER_TIMEOUT, connect, is_standby
from cdc.postgres.logical_messages import emit_message
from cdc.postgres.slot import SlotStatus, log_standby_snapshot, slot_status
from cdc.postgres.source_state import publication_status
from cdc.table import TableSchema, TableState

CHECK_PUBLICATION_EVERY: Final = 5.0
"""Seconds between two checks of the publication."""
READ_SCHEMAS_EVERY: Final = 5.0
"""Seconds between two reads of the log's `s` rows."""
BUDGET_WARNING: Final = 0.8
"""Share of `source.wal_budget` from which a warning is logged."""
LAST_REPORT_WITHIN: Final = 5.0
"""Maximum seconds to wait until the catalog has stored the last report."""
SLOT_IN_USE_EVERY: Final = 60.0
"""Seconds between two log messages while another reader uses the slot; attempts follow each other every second."""
REPORT_EVERY: Final = 1.0
"""Seconds between reports; a process without a report for five seconds is shown as down."""

SLOW_COMPILE: Final = 2.0
"""Duration in seconds from which loading the decoder is logged; a compiled decoder loads faster."""

ERRORS_WITH_POSITIONS: Final = (UndecodableWal, PublicationMissing, PublicationNarrowed, PublicationReplaced)
"""Errors to which the positions of slot and log are added; errors about the slot already contain its position."""
Located = TypeVar("Located", bound=SourceError)
log = structlog.get_logger("reader")


class StatusReporter(Thread):
    """Thread that reports the reader's state to the catalog.

    If source or catalog cannot be reached, it logs that and tries again.
    """

    def __init__(self, definition: Definition, process_metrics: metrics.Metrics, stop: Event) -> None:
        super().__init__(name="reporter", daemon=True)
        self._definition, self._metrics, self._stop_event = definition, process_metrics, stop
        self._state, self._last_state = "starting", "stopped"
        self._error: dict[str, str] | None = None
        self._heartbeat_due = time.monotonic() + definition.source.heartbeat
        self._catalog: Catalog | None = None
        self._ended, self._reporting = Event(), Lock()
        self._source: Any = None
        self._primary: Any = None
        self._open = ExitStack()
        self._captured: list[int] | None = None
        self._publication_due = 0.0
        self._warned = False
        self._in_use_message: str | None = None
        self._in_use_due = 0.0
        self._copied_before: dict[str, int] = {}
        self._waiting_since: float | None = None
        self._inexact: list[TableProgress] = []
        self._inexact_due = 0.0
        self._log: LogReader | None = None
        self.verdict: CdcError | None = None
        """Error because of which this thread has stopped the reader; None if it has not."""

    def report_running(self) -> None:
        """Report that an attempt to capture begins."""
        self._state, self._error = "running", None
        self._captured = None

    def report_started(self, start: ReaderStart) -> None:
        """Report that the replication stream is open."""
        if start.copied is not None:
            copy = start.copied
            log.info(
                "initial snapshot done",
                position=str(copy.position),
                tables=copy.tables,
                rows=copy.rows,
                copied_while_streaming=copy.later,
            )
        if start.compile_seconds > SLOW_COMPILE:
            log.info(
                "compiled the decoder; later starts use the compiled decoder", seconds=round(start.compile_seconds, 1)
            )
        if self._waiting_since is None:
            log.info("streaming changes from the source", position=str(start.position))
        else:
            seconds = round(time.monotonic() - self._waiting_since, 1)
            log.info("connected to the source again", position=str(start.position), after_seconds=seconds)
        self._waiting_since = None

    def report_copied(self) -> None:
        """Report that the initial snapshot is complete and the reader ends (snapshot.mode initial_only)."""
        self._last_state = "copied"

    def report_waiting(self, attempt: RetryCallState) -> None:
        """Report that an attempt failed and that another one follows."""
        exc = attempt.outcome.exception() if attempt.outcome else None
        assert isinstance(exc, CdcError)  # noqa: S101 - only those are retried
        self._metrics.add(metrics.RECONNECTS, 1, self._definition.name)
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        self._record_error("waiting", exc)

    def report_failure(self, exc: CdcError) -> None:
        """Report an error that is not retried."""
        if exc is not self.verdict:  # a verdict is already recorded
            self._record_error("failed", exc)

    def report_interrupted(self, exc: CdcError) -> None:
        """Report that the process was stopped before it could retry after this error."""
        if self._error != exc.to_json():
            self._record_error("stopped", exc)

    def close(self) -> None:
        """Write the last report: `stopped`, `copied` or `failed`, with the last error.

        Waits at most LAST_REPORT_WITHIN for the catalog.
        """
        self._ended.set()
        last = Thread(target=self._report_last, name="last report", daemon=True)
        last.start()
        last.join(LAST_REPORT_WITHIN)

    def run(self) -> None:
        """Report until close is called."""
        with self._open:
            while not self._ended.wait(REPORT_EVERY):
                if not self._stop_event.is_set():
                    self._check_source()
                    self._check_log()
                self._report(self._state)

    def _report_last(self) -> None:
        with self._reporting:
            self._send("failed" if self._state == "failed" else self._last_state)
            if self._catalog is not None:
                self._catalog.close()

    def _check_log(self) -> None:
        """Report whether the reader waits for the log's storage."""
        blocked = bool(self._metrics.value(metrics.LOG_BLOCKED, self._definition.name))
        if blocked and self._state == "running":
            self._record_error("waiting", LogUnwritable("the log's storage accepts no writes"))
        elif not blocked and self._error is not None and self._error["code"] == LogUnwritable.code:
            self._state, self._error = "running", None

    def _record_error(self, state: str, exc: CdcError) -> None:
        self._error = exc.to_json()
        self._state = state
        self._metrics.add(metrics.ERRORS, 1, self._definition.name, "reader", exc.code)
        if isinstance(exc, SlotInUse):
            if exc.message == self._in_use_message and time.monotonic() < self._in_use_due:
                return
            self._in_use_message, self._in_use_due = exc.message, time.monotonic() + SLOT_IN_USE_EVERY
        log.warning("reader stopped", state=state, code=exc.code, message=exc.message, fix=exc.fix)

    def _report(self, state: str) -> None:
        with self._reporting:
            if not self._ended.is_set():  # no report may follow the last one
                self._send(state)

    def _send(self, state: str) -> None:
        name = self._definition.name
        report = ProcessReport(
            pipeline=name,
            process="reader",
            pid=os.getpid(),
            state=state,
            error=self._error,
            figures=self._metrics.to_json(),
        )
        try:
            if self._catalog is None:
                self._catalog = Catalog.open(self._definition.catalog.url)
                known = self._catalog.tables.ls(name)
                self._copied_before = {table.topic: table.rows for table in known if not table.sink}
            self._catalog.processes.report(report)
            if tables := self._changed_tables(self._catalog):
                self._catalog.tables.record(name, tables)
        except CdcError as exc:
            log.warning("cannot write the status of the reader to the catalog", code=exc.code)

    def _changed_tables(self, catalog: Catalog) -> list[TableProgress]:
        """Return the progress of tables that this process has copied, and the updates from `inexact_tables`."""
        position = self._metrics.value(metrics.LOG_POSITION, self._definition.name)
        if position is not None and time.monotonic() >= self._inexact_due:
            self._inexact_due = time.monotonic() + READ_SCHEMAS_EVERY
            with suppress(LogError):  # the log does not exist yet
                known = self._refreshed_log().schemas()
                shown = [*self._copied_tables(), *catalog.tables.ls(self._definition.name)]
                self._inexact = inexact_tables(known.values(), shown, int(position))
        marked = {table.topic for table in self._inexact}
        return [*(table for table in self._copied_tables() if table.topic not in marked), *self._inexact]

    def _copied_tables(self) -> list[TableProgress]:
        """Return the progress of the tables from which this process copied rows.

        Each row count includes the rows that the catalog had counted before.
        """
        position = self._metrics.value(metrics.LOG_POSITION, self._definition.name)
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
            for sample in self._metrics
            if sample.metric is metrics.SNAPSHOT_ROWS
        ]

    def _check_source(self) -> None:
        source = self._definition.source
        if self._state != "running":
            return
        try:
            if self._source is None:
                self._source = connect(source.current_dsn(), application_name="cdc reporter", timeout=ANSWER_TIMEOUT)
                self._open.callback(self._source.close)
            if source.heartbeat and time.monotonic() >= self._heartbeat_due:
                self._send_heartbeat()
                self._heartbeat_due = time.monotonic() + source.heartbeat
            if time.monotonic() >= self._publication_due:
                self._publication_due = time.monotonic() + CHECK_PUBLICATION_EVERY
                self._check_publication()
            slot = slot_status(self._source, source.slot.name)
        except CdcError as exc:
            self._source = self._primary = None
            log.warning("cannot query the slot and the publication at the source", code=exc.code)
            return
        if slot is not None:
            self._check_wal_budget(slot)

    def _send_heartbeat(self) -> None:
        """Send a heartbeat to `source.primary` if the definition has it, otherwise to the source.

        A source that is a standby gets no heartbeat.
        """
        source = self._definition.source
        if source.primary is None:
            if not is_standby(self._source):
                emit_message(self._source, HEARTBEAT_PREFIX, self._definition.name)
            return
        if self._primary is None:
            self._primary = connect(source.current_primary(), application_name="cdc heartbeat", timeout=ANSWER_TIMEOUT)
            self._open.callback(self._primary.close)
        emit_message(self._primary, HEARTBEAT_PREFIX, self._definition.name)
        log_standby_snapshot(self._primary)

    def _check_publication(self) -> None:
        """Stop the reader if the publication is missing: from Postgres 18 on, the server then sends nothing."""
        try:
            known = self._refreshed_log()
        except LogError:
            return  # the log does not exist yet
        last = known.last_commit
        if last is None or not last.publication:
            return
        if self._captured is None:
            self._captured = captured_oids(known.schemas())
        found = publication_status(self._source, self._definition.source.publication.name, self._captured)
        try:
            check_publication(last, found)
        except SourceError as exc:
            self._stop_reader(exc)

    def _refreshed_log(self) -> LogReader:
        """Return the log at its latest commit; raises LogError if there is no log.

        Refreshing an open log costs a tenth of opening it.
        """
        if self._log is None:
            self._log = LogReader(self._definition.log.root)
        self._log.refresh()
        return self._log

    def _check_wal_budget(self, slot: SlotStatus) -> None:
        source = self._definition.source
        if source.wal_budget is None or slot.retained_bytes < source.wal_budget * BUDGET_WARNING:
            self._warned = False
            return
        over = slot.retained_bytes > source.wal_budget
        message = (
            f"the server retains {slot.retained_bytes} bytes of WAL for slot {slot.name!r}, and source.wal_budget is "
            f"{source.wal_budget} bytes"
        )
        if over and source.on_wal_budget is OnWalBudget.STOP:
            self._stop_reader(WalBudgetExceeded(message))
        elif not self._warned:
            self._warned = True
            log.warning("WAL budget is almost used" if not over else "WAL budget is exceeded", message=message)

    def _stop_reader(self, found: CdcError) -> None:
        """Store an error in `verdict`, and stop the reader."""
        verdict = add_positions(found, self._definition) if isinstance(found, ERRORS_WITH_POSITIONS) else found
        if self.verdict is None:
            self.verdict = verdict
            self._record_error("failed", verdict)
        self._stop_event.set()


def inexact_tables(known: Iterable[TableSchema], shown: Iterable[TableProgress], position: int) -> list[TableProgress]:
    """Return the table entries that the catalog must store.

    A table needs an entry if it is not LIVE in the log, has no entry yet, or has an entry with an outdated state.

    known: the log's tables; a dropped table is ignored if another table has its name. shown: the present entries.
    """
    latest: dict[str, TableSchema] = {}
    for schema in known:
        if schema.topic not in latest or latest[schema.topic].state is TableState.DROPPED:
            latest[schema.topic] = schema
    by_topic = {table.topic: table for table in shown if not table.sink}
    states = {state.value for state in TableState if state is not TableState.LIVE}
    found = []
    for topic, schema in latest.items():
        before = by_topic.get(topic, TableProgress("", topic, "streaming", None, position, None, 0))
        if before.state == REFUSED and schema.state is TableState.DROPPED:
            continue  # a rule matches it again
        if schema.state is not TableState.LIVE:
            found.append(replace(before, state=schema.state.value, reason=schema.reason, position=position))
        elif topic not in by_topic:  # the catalog is new
            found.append(before)
        elif before.state in {*states, REFUSED}:
            found.append(replace(before, state="streaming", reason=None, position=position))
    return found


def add_positions(exc: Located, definition: Definition) -> Located:
    """Return the error with the positions of slot and log; unchanged if the source or its slot is unavailable."""
    source = definition.source
    try:
        with connect(source.current_dsn(), application_name="cdc identify", timeout=ANSWER_TIMEOUT) as conn:
            slot = slot_status(conn, source.slot.name)
    except CdcError:
        return exc
    if slot is None:
        return exc
    where = f"slot {slot.name!r} is at {slot.confirmed_flush}, the log is {_log_position(definition)}"
    if isinstance(exc, UndecodableWal):
        where += "; the server cannot decode the next transaction"
    return type(exc)(f"{exc.message}: {where}", remedy=_skip(exc, slot) if isinstance(exc, UndecodableWal) else exc.fix)


def _log_position(definition: Definition) -> str:
    try:
        durable = LogReader(definition.log.root).durable
    except LogError as exc:
        return f"unreadable ({exc.code})"
    return "empty" if durable is None else f"at {durable}"


def _skip(exc: UndecodableWal, slot: SlotStatus) -> str:
    """Return a remedy that skips all WAL up to the slot's present WAL end.

    The server reports neither the end of the undecodable transaction nor the tables that it changed.
    """
    cause = "" if exc.fix == UndecodableWal.remedy else exc.fix.partition(": run ")[0] + "; "
    skip = f"'cdc slots recover -c FILE --skip-to {slot.wal_end} --resync \"*\"'"
    return (
        f"{cause}stop the reader, run {skip} (or with an earlier LSN after that transaction, and with the tables "
        "that were "
        "written up to that LSN), start the reader, then run 'cdc tables resync \"*\"'"
    )
