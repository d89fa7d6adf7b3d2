"""Backfill worker: a thread of the reader that carries out the backfill requests in the catalog.

Backfills run one at a time, the oldest request first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from glob import escape
from itertools import chain
from operator import attrgetter
from threading import Thread
from typing import Any, Final

import structlog

from cdc import metrics
from cdc.catalog import Catalog
from cdc.catalog.commands import Command, CommandState
from cdc.config import Definition
from cdc.config.source import Snapshot, SnapshotMode
from cdc.errors import CatalogUnavailable, CdcError, PreflightFailed, Reaction
from cdc.position import Position
from cdc.postgres.connection import cancel_statement, check_same_server, connect, server_start
from cdc.postgres.sql_ascii import copy_text_repair
from cdc.snapshot.backfill import Backfill, BackfillControl, BackfillDirective
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction, BackfillRequest, BackfillState, check_request
from cdc.snapshot.chunk_copier import CHUNKS_AHEAD, CopyContext, CopyStopped
from cdc.snapshot.chunk_plan import ChunkLimits
from cdc.snapshot.chunk_sender import ChunkSender, ReaderLink
from cdc.snapshot.copy_limits import CopyRateLimit, PauseGate
from cdc.snapshot.debezium_signals import Signals
from cdc.snapshot.executor_exchange import ExecutorsChanged, ExecutorTasks
from cdc.snapshot.missing_base_rows import unconfirmed_xids
from cdc.snapshot.publication_sync import (
    PublicationSync,
    PublicationSyncWorker,
    duplicate_topics,
    table_problems,
)
from cdc.table import TableSchema, TableState, matches

POLL: Final = 1.0
"""Seconds between two polls of the catalog; a poll takes one or two milliseconds."""

RETRY_REFUSED_EVERY: Final = 30.0
"""Seconds between two checks whether a right that a copy missed was granted."""
CANCEL_EVERY: Final = 0.1
"""Seconds between two attempts to cancel the queries of a backfill while the reader ends."""
CHUNK_MEMORY: Final = 16 * 1024 * 1024
"""Approximate maximum size in bytes of the Arrow rows of all chunks in memory."""
CHUNKS_AS_ROWS: Final = 2
"""Approximate number of pending chunks that are in memory as Arrow rows; the others are already encoded as Parquet."""

log = structlog.get_logger("backfill")


class BackfillWorker(Thread):
    """Thread that runs backfills until the reader stops, and waits while source or catalog are unreachable."""

    def __init__(
        self,
        definition: Definition,
        link: ReaderLink,
        signals: Signals,
        process_metrics: metrics.Metrics,
        reload: Callable[[], Definition] | None = None,
    ) -> None:
        """`reload` returns the current definition, whose table rules may change while the reader runs."""
        super().__init__(name="jobs", daemon=True)
        self._definition, self._link, self._signals, self._metrics = definition, link, signals, process_metrics
        self._windows, self._stop_event = link.windows, link.stop
        self._paused: dict[int, bool] = {}
        self._conns: tuple[Any, ...] = ()
        """The connections that the running backfill reads with."""
        self.retry_refused_every = RETRY_REFUSED_EVERY
        self._refused_due = 0.0
        """Time on the monotonic clock of the next check of missing rights."""
        sync = PublicationSync(reload or (lambda: definition), definition, link)
        self._sync_worker = PublicationSyncWorker(sync, link, definition.name, definition.catalog.url)
        self.has_copied_all = False
        """True if the reader ends because all copies are complete (snapshot.mode initial_only)."""

    def run(self) -> None:
        """Poll the catalog until the reader stops, process signals, and run the backfills."""
        self._sync_worker.start()
        while not self._stop_event.wait(POLL):
            try:
                with Catalog.open(self._definition.catalog.url) as catalog:
                    self._serve(catalog)
            except CatalogUnavailable as exc:
                log.warning(
                    "cannot read backfill requests from the catalog; the reader tries again",
                    code=exc.code,
                    message=exc.message,
                    fix=exc.fix,
                )
        self._sync_worker.join()

    def end(self, within: float) -> None:
        """Wait at most `within` seconds until the thread has ended, and cancel its queries; the stop event is set.

        A thread that begins to copy while the interpreter ends prints a traceback, because it cannot start threads.
        """
        deadline = time.monotonic() + within
        self.join(CANCEL_EVERY)
        while self.is_alive() and time.monotonic() < deadline:
            for conn in self._conns:
                cancel_statement(conn)
            self.join(CANCEL_EVERY)

    def _serve(self, catalog: Catalog) -> None:
        while not self._stop_event.wait(POLL):
            self._signals.process(catalog)
            self._post_initial_copies(catalog)
            for command in catalog.commands.pending(self._definition.name, BACKFILL):
                # asked once: the session may end at any moment, and then no schema is known
                if self._may_begin(catalog, command) and (versions := self._windows.schemas()):
                    self._run_command(catalog, command, versions)
            self._end_when_copied(catalog)

    def _end_when_copied(self, catalog: Catalog) -> None:
        """End the reader after all copies are complete, if snapshot.mode is initial_only."""
        if self._definition.snapshot.mode is not SnapshotMode.INITIAL_ONLY:
            return
        versions = self._windows.schemas()
        waiting = catalog.commands.pending(self._definition.name, BACKFILL)
        if versions and not waiting and all(s.state is not TableState.SNAPSHOTTING for s in versions):
            log.info("all tables are copied, so the reader ends (snapshot.mode initial_only)")
            self.has_copied_all = True
            self._stop_event.set()

    def _post_initial_copies(self, catalog: Catalog) -> None:
        """Request a full copy of each table in state `snapshotting` that no request of this epoch covers yet."""
        versions = self._windows.schemas()
        # of two tables with one name, one is dropped and will soon be marked
        wanted = {s.topic for s in versions if s.state is TableState.SNAPSHOTTING} - duplicate_topics(versions)
        if not wanted:
            return
        epoch = self._link.durable.position.epoch
        commands = catalog.commands.ls(self._definition.name, BACKFILL)
        self._continue_refused_copies(catalog, commands, wanted)
        for command in commands:
            requested = BackfillRequest.from_json(command.payload)
            given_up = command.state is CommandState.FAILED and _ended_in(command) == epoch
            completes = requested.completes and requested.epoch == epoch and command.state is CommandState.PENDING
            if completes or (requested.resync and (given_up or command.state is CommandState.PENDING)):
                wanted = {topic for topic in wanted if not matches(topic, requested.tables)}
        if wanted:
            request = BackfillRequest(tuple(escape(topic) for topic in sorted(wanted)), resync=True, epoch=epoch)
            catalog.commands.post(self._definition.name, BACKFILL, request.to_json())

    def _continue_refused_copies(self, catalog: Catalog, commands: list[Command], uncopied: set[str]) -> None:
        """Continue the full copies that a missing right ended, every RETRY_REFUSED_EVERY seconds, if it was granted.

        commands: newest first. uncopied: topics of the tables in state `snapshotting`.
        """
        if time.monotonic() < self._refused_due:
            return
        for command in commands:
            requested = BackfillRequest.from_json(command.payload)
            tables = {topic for topic in uncopied if requested.resync and matches(topic, requested.tables)}
            uncopied = uncopied - tables
            code = ((command.result or {}).get("error") or {}).get("code")
            is_refused = command.state is CommandState.FAILED and code == PreflightFailed.code
            if not tables or not is_refused or _ended_in(command) != self._link.durable.position.epoch:
                continue
            self._refused_due = time.monotonic() + self.retry_refused_every
            if not tables <= self._problems(tables).keys():
                log.info("backfill continued, because the right that it missed was granted", id=command.id)
                catalog.commands.reopen(command.id)

    def _problems(self, topics: set[str]) -> Mapping[str, tuple[str, str | None]]:
        """Return the reasons why tables cannot be read, by topic; none if the source does not answer."""
        try:
            return table_problems(self._definition, sorted(topics))
        except CdcError as exc:
            log.warning("cannot check the rights on tables", code=exc.code, message=exc.message)
            return dict.fromkeys(topics, (exc.message, None))

    def _may_begin(self, catalog: Catalog, command: Command) -> bool:
        was_paused = (command.result or {}).get("state") == "paused"  # a restarted reader keeps it paused
        self._paused.setdefault(command.id, was_paused)
        if not (cancelled := self._read_actions(catalog, command.id)) and not self._paused[command.id]:
            return True
        progress = BackfillState.from_json(command.result)
        progress.state = "cancelled" if cancelled else "paused"
        if cancelled:
            self._finish_incomplete(catalog, command.id, progress)
        elif command.result != progress.to_json():
            catalog.commands.record(command.id, progress.to_json())
        return False

    def _run_command(self, catalog: Catalog, command: Command, versions: list[TableSchema]) -> None:
        request, progress = BackfillRequest.from_json(command.payload), BackfillState.from_json(command.result)
        log.info("backfill started", id=command.id, tables=list(request.tables), sink=request.sink)
        try:
            self._backfill(catalog, command.id, request, progress, versions)
        except CopyStopped:
            if not self._stop_event.is_set():
                progress.state = "cancelled"
                self._finish_incomplete(catalog, command.id, progress)
            return
        except ExecutorsChanged:
            log.info("executors of Spark joined or left the backfill; the reader continues it", id=command.id)
            return
        except CdcError as exc:
            is_temporary = exc.reaction is Reaction.RETRY
            event = "backfill interrupted; the reader continues it" if is_temporary else "backfill failed"
            log.warning(event, id=command.id, code=exc.code, message=exc.message, fix=exc.fix)
            if not is_temporary:
                progress.state = "failed"
                if isinstance(exc, PreflightFailed) and request.resync:
                    exc = self._with_statements(exc, progress)
                self._finish_incomplete(catalog, command.id, progress, exc)
            return  # after a temporary error, the backfill continues at the next poll
        catalog.commands.finish(command.id, progress.to_json())
        log.info("backfill done", id=command.id, rows=sum(table.rows for table in progress.tables.values()))

    def _with_statements(self, exc: CdcError, progress: BackfillState) -> CdcError:
        """Return the error of a copy that a missing right ended, with the SQL that grants it."""
        failed = {topic for topic, table in progress.tables.items() if table.state == "failed"}
        statements = [sql for _, sql in self._problems(failed).values() if sql]
        message = f"{exc.message}; the reader tries again every {RETRY_REFUSED_EVERY:.0f} s"
        return PreflightFailed(message, remedy=" ".join(statements) or exc.fix)

    def _finish_incomplete(
        self, catalog: Catalog, job: int, progress: BackfillState, exc: CdcError | None = None
    ) -> None:
        """Record that a backfill failed with the error `exc`, or was cancelled if `exc` is None.

        After a cancelled or failed full copy, the reader does not request another copy of the tables in this epoch.
        """
        error = {} if exc is None else {"error": exc.to_json()}
        epoch = self._link.durable.position.epoch
        catalog.commands.finish(job, {**progress.to_json(), **error, "epoch": epoch}, ok=False)

    def _backfill(
        self,
        catalog: Catalog,
        job: int,
        request: BackfillRequest,
        progress: BackfillState,
        versions: list[TableSchema],
    ) -> None:
        definition, source = self._definition, self._definition.source
        root = definition.log.root
        known = {schema.relation: schema for schema in versions}
        tables = check_request(request, known, {sink.name: sink for sink in definition.sinks_of_tables})
        dsn = source.current_dsn()
        with ExitStack() as opened:
            conns = [
                opened.enter_context(connect(dsn, application_name="cdc backfill"))
                for _ in range(definition.snapshot.parallel)
            ]
            self._conns = tuple(conns)
            opened.callback(setattr, self, "_conns", ())
            primary = opened.enter_context(connect(source.current_primary(), application_name="cdc watermarks"))
            if source.primary is None:
                # the rows of one server and the watermark of another would not belong together
                for conn in conns:
                    check_same_server(server_start(conn), server_start(primary))
            stream = ChunkSender(primary, self._link)
            executors = opened.enter_context(ExecutorTasks(catalog, definition.name, root))
            context = CopyContext(
                sender=stream,
                publication=source.publication.name,
                repair=copy_text_repair(dsn, source.undecodable),
                limits=_limits(definition.snapshot),
                rate_limit=CopyRateLimit(request.rate, definition.snapshot.max_source_load, stream, self._stop_event),
                gate=PauseGate(),
                max_chunks=definition.snapshot.parallel + CHUNKS_AHEAD,
                log=root,
                stop=self._stop_event,
                executors=executors,
                server=server_start(conns[0]),
            )
            control = BackfillControl(
                directive=lambda: self._directive(catalog, job),
                record=lambda so_far: catalog.commands.record(job, so_far.to_json()),
                count=lambda topic, rows: self._metrics.add(metrics.SNAPSHOT_ROWS, rows, definition.name, topic),
            )
            self._wait_until_durable(self._windows.track_xids(on=True))
            try:
                self._windows.add_unconfirmed_xids(unconfirmed_xids(conns[0], root))
                Backfill(request, progress, conns, context, control).run(tables)
            finally:
                self._windows.track_xids(on=False)

    def _wait_until_durable(self, received: Position) -> None:
        """Wait until the durable position has reached `received`; raise CopyStopped if the reader stops."""
        while not self._link.durable.wait(received, POLL / 10):
            if self._stop_event.is_set():
                raise CopyStopped

    def _directive(self, catalog: Catalog, job: int) -> BackfillDirective:
        if self._stop_event.is_set() or self._read_actions(catalog, job):
            return BackfillDirective.END
        return BackfillDirective.PAUSE if self._paused.get(job) else BackfillDirective.CONTINUE

    def _read_actions(self, catalog: Catalog, job: int) -> bool:
        """Apply the pending pause, resume and cancel actions on a backfill, and return True if it is cancelled."""
        self._signals.process(catalog)
        cancelled = False
        pending = (catalog.commands.pending(self._definition.name, verb.kind) for verb in BackfillAction)
        for action in sorted(chain.from_iterable(pending), key=attrgetter("id")):
            if action.payload.get("id") == job:
                catalog.commands.finish(action.id, {})
                cancelled = cancelled or action.kind == BackfillAction.CANCEL.kind
                self._paused[job] = action.kind == BackfillAction.PAUSE.kind
        return cancelled


def _ended_in(command: Command) -> int | None:
    """Return the epoch in which a backfill failed or was cancelled."""
    requested: int | None = command.payload.get("epoch")
    epoch: int | None = (command.result or {}).get("epoch", requested)
    return epoch


def _limits(snapshot: Snapshot) -> ChunkLimits:
    return ChunkLimits(snapshot.chunk_rows, CHUNK_MEMORY // (snapshot.parallel + CHUNKS_AS_ROWS))
