"""Reader monitor: writes the reader's state to the catalog, watches slot and publication, and sends heartbeats.

When the main thread knows how the reader ended, it calls `close`, which writes the last report. The reporter's own
thread cannot write the last report. It may be waiting for the source, and `stop` is set before a failure is known.

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
from cdc.catalog import REFUSED, Catalog, ProcessReport, RecordedProgress, TableProgress
from cdc.config import Definition
from cdc.config.source import OnWalBudget
from cdc.errors import (
    CdcError,
    LogError,
    LogUnwritable,
    PublicationMissing,
    PublicationNarrowed,
    PublicationReplaced,
    Reaction,
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
"""Share of `source.wal_budget` from which the reporter logs a warning."""
LAST_REPORT_WITHIN: Final = 5.0
"""Maximum seconds for which `close` waits until the catalog has stored the last report."""
SAME_ERROR_EVERY: Final = 60.0
"""Seconds between two log messages of the same error, while attempts follow each other every one or two seconds."""
REPORT_EVERY: Final = 1.0
"""Seconds between reports; a process without a report for five seconds is shown as down."""

SLOW_COMPILE: Final = 2.0
"""Seconds of loading the decoder above which the duration is logged; a compiled decoder loads faster."""

ERRORS_WITH_POSITIONS: Final = (UndecodableWal, PublicationMissing, PublicationNarrowed, PublicationReplaced)
"""Errors to which the positions of slot and log are added; errors about the slot already contain its position."""
Located = TypeVar("Located", bound=SourceError)
log = structlog.get_logger("reader")


class StatusReporter(Thread):
    """Thread that reports the reader's state to the catalog, and checks the source.

    If source or catalog cannot be reached, the thread logs a warning and tries again.
    """

    def __init__(self, definition: Definition, process_metrics: metrics.Metrics, stop: Event) -> None:
        super().__init__(name="reporter", daemon=True)
        self._definition = definition
        self._metrics = process_metrics
        self._stop_event = stop
        self._state, self._last_state = "starting", "stopped"
        self._error: dict[str, str] | None = None
        self._heartbeat_due = time.monotonic() + definition.source.heartbeat
        self._catalog: Catalog | None = None
        self._ended, self._reporting = Event(), Lock()
        self._reconnects = False
        self._source: Any = None
        self._primary: Any = None
        self._open = ExitStack()
        self._captured: list[int] | None = None
        self._publication_due = 0.0
        self._warned = False
        self._logged_message: str | None = None
        self._same_error_due = 0.0
        self._copied_before: dict[str, int] = {}
        self._waiting_since: float | None = None
        self._lag_before, self._lag_lock = 0.0, Lock()
        """Lag of the last transaction before the stream ended; the lag grows from it until the stream begins again."""
        self._inexact: list[TableProgress] = []
        self._inexact_due = 0.0
        self._has_continued = False
        """Whether the counters of the earlier reader were added."""
        self._unlisted: set[str] = set()
        """What `unlisted_topics` returned for the log; the catalog has no entry of them."""
        self._recorded = RecordedProgress[TableProgress]()
        self._log: LogReader | None = None
        self.verdict: CdcError | None = None
        """Error because of which this thread has stopped the reader; None if it has not stopped the reader."""

    def report_running(self) -> None:
        """Set the reported state to `running`, because an attempt to capture begins."""
        self._state, self._error = "running", None
        self._captured = None
        self._reconnects = True  # the DSN may lead to another server now, and the previous one may still answer

    def report_started(self, start: ReaderStart) -> None:
        """Log that the replication stream is open, and the initial snapshot if this start has taken one."""
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
                "compiled the decoder; later starts load the compiled code", seconds=round(start.compile_seconds, 1)
            )
        self._report_proved_promotion(start)
        if self._waiting_since is None:
            log.info("streaming changes from the source", position=str(start.position))
        else:
            seconds = round(time.monotonic() - self._waiting_since, 1)
            log.info("connected to the source again", position=str(start.position), after_seconds=seconds)
            with self._lag_lock:  # the next transaction will show how far the log is behind
                self._waiting_since = None
                self._metrics.set(metrics.SOURCE_LAG_SECONDS, self._lag_before, self._definition.name)
        self._logged_message = None

    def _report_proved_promotion(self, start: ReaderStart) -> None:
        """Log that the source was promoted since the last commit of the log, and that nothing of the log was lost."""
        last = LogReader(self._definition.log.root).last_commit
        timeline = self._metrics.value(metrics.SOURCE_TIMELINE, self._definition.name)
        if last is not None and timeline is not None and timeline > last.timeline:
            log.info(
                "the promoted server has every transaction of the log, so the epoch continues without a copy",
                timeline=int(timeline),
                timeline_before=last.timeline,
                position=str(start.position),
            )

    def report_copied(self) -> None:
        """Make the last report say `copied`: all rows were copied, and the reader ends (snapshot.mode initial_only)."""
        self._last_state = "copied"

    def report_waiting(self, attempt: RetryCallState) -> None:
        """Report that an attempt to capture failed and that the reader tries again."""
        exc = attempt.outcome.exception() if attempt.outcome else None
        assert isinstance(exc, CdcError)  # noqa: S101 - only a CdcError is retried
        self._metrics.add(metrics.RECONNECTS, 1, self._definition.name)
        if self._waiting_since is None:
            self._lag_before = self._last_lag()
            self._waiting_since = time.monotonic()
        self._record_error("waiting", exc)

    def _last_lag(self) -> float:
        """Return the lag of the last transaction; if this process has none, the age of the log's last transaction."""
        lag = self._metrics.value(metrics.SOURCE_LAG_SECONDS, self._definition.name)
        if lag is not None:
            return lag
        with suppress(LogError):  # the log does not exist yet
            last = LogReader(self._definition.log.root).last_commit
            if last is not None and last.committed_at:
                return max(0.0, time.time() - last.committed_at / 1e6)
        return 0.0

    def _record_lag(self) -> None:
        """Let the lag grow while there is no stream: nothing proves that the log has every transaction."""
        with self._lag_lock:
            if self._waiting_since is not None:
                lag = self._lag_before + time.monotonic() - self._waiting_since
                self._metrics.set(metrics.SOURCE_LAG_SECONDS, lag, self._definition.name)

    def report_failure(self, exc: CdcError) -> None:
        """Report an error after which the reader does not try again."""
        if exc is not self.verdict:  # a verdict is already recorded
            self._record_error("failed", exc)

    def report_interrupted(self, exc: CdcError) -> None:
        """Report that the process was stopped while it waited to try again after this error."""
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
        """Check source and log, and report the state, every REPORT_EVERY seconds, until `close` is called."""
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
        """Report state `waiting` while the log's storage accepts no writes, and `running` afterwards."""
        blocked = bool(self._metrics.value(metrics.LOG_BLOCKED, self._definition.name))
        if blocked and self._state == "running":
            self._record_error("waiting", LogUnwritable("the log's storage accepts no writes, so the reader waits"))
        elif not blocked and self._error is not None and self._error["code"] == LogUnwritable.code:
            self._state, self._error = "running", None

    def _record_error(self, state: str, exc: CdcError) -> None:
        self._error = exc.to_json()
        self._state = state
        self._metrics.add(metrics.ERRORS, 1, self._definition.name, "reader", exc.code)
        if exc.reaction is Reaction.RETRY:
            if exc.message == self._logged_message and time.monotonic() < self._same_error_due:
                return
            self._logged_message, self._same_error_due = exc.message, time.monotonic() + SAME_ERROR_EVERY
        log.warning(
            "capture is interrupted; the reader tries again"
            if state == "waiting"
            else "capture stopped; carry out 'fix'",
            state=state,
            code=exc.code,
            message=exc.message,
            fix=exc.fix,
        )

    def _report(self, state: str) -> None:
        with self._reporting:
            if not self._ended.is_set():  # no report may follow the last one
                self._send(state)

    def _send(self, state: str) -> None:
        name = self._definition.name
        self._record_lag()
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
                tables = self._catalog.tables.ls(name)
                self._copied_before = {table.topic: table.rows for table in tables if not table.sink}
                if not self._has_continued:
                    self._metrics.continue_from(self._catalog.processes.figures(name, "reader"))
                    self._has_continued = True
            self._catalog.processes.report(report)
            if tables := self._recorded.due(self._changed_tables(self._catalog), time.monotonic()):
                self._catalog.tables.record(name, tables)
        except CdcError as exc:
            self._recorded.forget()
            log.warning(
                "cannot write the reader's status to the catalog, so 'cdc status' shows an old status",
                code=exc.code,
                message=exc.message,
            )

    def _changed_tables(self, catalog: Catalog) -> list[TableProgress]:
        """Return the catalog entries to write: tables that this process has copied, and those from `inexact_tables`."""
        position = self._metrics.value(metrics.LOG_POSITION, self._definition.name)
        if position is not None and time.monotonic() >= self._inexact_due:
            self._inexact_due = time.monotonic() + READ_SCHEMAS_EVERY
            with suppress(LogError):  # the log does not exist yet
                schemas = self._refreshed_log().schemas()
                shown = [*self._copied_tables(), *catalog.tables.ls(self._definition.name)]
                self._inexact = inexact_tables(schemas.values(), shown, int(position))
                self._unlisted = unlisted_topics(schemas.values())
                listed = {table.topic for table in shown if not table.sink and table.state != REFUSED}
                if gone := self._unlisted & listed:
                    catalog.tables.forget(self._definition.name, "", gone)
        marked = {table.topic for table in self._inexact} | self._unlisted
        return [*(table for table in self._copied_tables() if table.topic not in marked), *self._inexact]

    def _copied_tables(self) -> list[TableProgress]:
        """Return the progress of the tables from which this process copied rows.

        Each row count includes the rows that earlier processes copied, as the catalog has recorded them.
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
        if self._reconnects:
            self._reconnects = False
            for open_session in filter(None, (self._source, self._primary)):
                open_session.close()
            self._source = self._primary = None
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
            log.warning(
                "cannot query slot and publication at the source; no heartbeat is sent until the source answers",
                code=exc.code,
                message=exc.message,
            )
            return
        if slot is not None:
            self._check_wal_budget(slot)

    def _send_heartbeat(self) -> None:
        """Write a heartbeat at `source.primary` if the definition has this key, otherwise at the source.

        A standby is read-only, so it gets no heartbeat.
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
        """Stop the reader if the publication no longer sends all changes of the captured tables.

        From Postgres 18 on, a missing publication causes no error in the stream: the server just sends no changes.
        """
        try:
            log = self._refreshed_log()
        except LogError:
            return  # the log does not exist yet
        last = log.last_commit
        if last is None or not last.publication:
            return
        if self._captured is None:
            self._captured = captured_oids(log.schemas())
        publication = publication_status(self._source, self._definition.source.publication.name, self._captured)
        try:
            check_publication(last, publication)
        except SourceError as exc:
            self._stop_reader(exc)

    def _refreshed_log(self) -> LogReader:
        """Return a reader of the log at its latest commit; raises LogError if there is no log.

        Refreshing an open log takes a tenth of the time of opening it.
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
            log.warning(
                "WAL budget is almost used; once it is exceeded, the reader follows source.on_wal_budget"
                if not over
                else "WAL budget is exceeded; the WAL can fill the source's disk",
                message=message,
            )

    def _stop_reader(self, error: CdcError) -> None:
        """Store the error in `verdict`, report it, and stop the reader."""
        verdict = add_positions(error, self._definition) if isinstance(error, ERRORS_WITH_POSITIONS) else error
        if self.verdict is None:
            self.verdict = verdict
            self._record_error("failed", verdict)
        self._stop_event.set()


def inexact_tables(
    schemas: Iterable[TableSchema], shown: Iterable[TableProgress], position: int
) -> list[TableProgress]:
    """Return new catalog entries for the tables whose stored entry is missing or may be outdated.

    These are the tables that are not LIVE in the log, that have no entry, or that are LIVE in the log but not according
    to their entry.

    schemas: the log's tables; a dropped table is ignored if another table has its name. shown: the entries that the
    catalog contains. position: durable position of the log.
    """
    latest: dict[str, TableSchema] = {}
    for schema in schemas:
        if schema.topic not in latest or latest[schema.topic].state is TableState.DROPPED:
            latest[schema.topic] = schema
    by_topic = {table.topic: table for table in shown if not table.sink}
    states = {state.value for state in TableState if state is not TableState.LIVE}
    changed = []
    for topic, schema in latest.items():
        before = by_topic.get(topic, TableProgress("", topic, "streaming", None, position, None, 0))
        if schema.removed or (before.state == REFUSED and schema.state is TableState.DROPPED):
            continue  # not listed, or a rule matches the table again
        if schema.state is not TableState.LIVE:
            changed.append(replace(before, state=schema.state.value, reason=schema.reason, position=position))
        elif topic not in by_topic:  # a new catalog has no entries
            changed.append(before)
        elif before.state in {*states, REFUSED}:
            changed.append(replace(before, state="streaming", reason=None, position=position))
    return changed


def unlisted_topics(tables: Iterable[TableSchema]) -> set[str]:
    """Return topics that no table of the log has: of tables that the definition no longer includes, and earlier topics
    of renamed tables. tables: those of the log.
    """
    schemas = list(tables)
    left = {topic for schema in schemas for topic in schema.former_topics}
    left |= {schema.topic for schema in schemas if schema.removed}
    return left - {schema.topic for schema in schemas if not schema.removed}


def add_positions(exc: Located, definition: Definition) -> Located:
    """Return the error with the positions of slot and log in its message.

    If the source does not answer or has no such slot, the function returns the error unchanged.
    """
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
    """Return a remedy whose commands skip all WAL that the server has written up to now, and copy all tables again.

    The server reports neither the end of the undecodable transaction nor the tables that the transaction changed.
    """
    cause = exc.fix.removesuffix(UndecodableWal.remedy)
    skip = f"'cdc slots recover -c FILE --skip-to {slot.wal_end} --resync \"*\"'"
    return (
        f"{cause}stop the reader, run {skip}, start the reader, then run 'cdc tables resync \"*\"'; to copy fewer "
        "tables, write a lower LSN that is still after the undecodable transaction, and name the tables that were "
        "written up to that LSN"
    )
