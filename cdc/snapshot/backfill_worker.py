"""Jobs: carries out the backfills that the catalog asks for, oldest first, one at a time, beside the stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from glob import escape
from itertools import chain
from operator import attrgetter
from threading import Event, Thread
from typing import Final

import structlog

from cdc import metrics
from cdc.catalog import Catalog
from cdc.catalog.commands import Command, CommandState
from cdc.config import Definition
from cdc.config.definition import Snapshot, SnapshotMode
from cdc.errors import CatalogUnavailable, CdcError, Reaction
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.text_repair import copy_text_repair
from cdc.snapshot.backfill import Backfill, BackfillControl, BackfillDirective
from cdc.snapshot.backfill_state import BACKFILL, BackfillAction, BackfillRequest, BackfillState, check_request
from cdc.snapshot.chunk_plan import ChunkLimits
from cdc.snapshot.chunk_reader import CHUNKS_AHEAD, CopyContext, CopyStopped, PauseGate
from cdc.snapshot.chunk_sender import ChunkSender
from cdc.snapshot.publication_sync import PublicationSync
from cdc.snapshot.publication_sync_worker import PublicationSyncWorker, duplicate_topics
from cdc.snapshot.rate_limit import CopyRateLimit
from cdc.snapshot.signals import Signals
from cdc.snapshot.unconfirmed_xids import unconfirmed_xids
from cdc.snapshot.watermark_window import WatermarkWindows
from cdc.table import TableState, matches

POLL: Final = 1.0
"""Seconds between two looks at the catalog: each costs a millisecond or two, and most find nothing."""

CHUNK_MEMORY: Final = 16 * 1024 * 1024
"""Bytes of the rows, as Arrow, of all chunks that are in memory, about."""
CHUNKS_AS_ROWS: Final = 2
"""Of the chunks on their way so many are in memory as rows, about: what is encoded is small."""

log = structlog.get_logger("backfill")


class BackfillWorker(Thread):
    """Runs until stop is set; a source or a catalog that is away is waited for."""

    def __init__(
        self,
        definition: Definition,
        placing: WatermarkWindows,
        figures: metrics.Metrics,
        stop: Event,
        again: Callable[[], Definition] | None = None,
    ) -> None:
        """again: reads the definition anew, whose rules for tables may change while the reader runs."""
        super().__init__(name="jobs", daemon=True)
        self._definition, self._placing, self._figures, self._stop_event = definition, placing, figures, stop
        self._paused: dict[int, bool] = {}
        membership = PublicationSync(again or (lambda: definition), definition, placing, stop)
        self._keeping = PublicationSyncWorker(membership, placing, definition.name, definition.catalog.url, stop)
        self.at_end: Callable[[], None] | None = None
        """Called before the reader ends because everything that it is there for is copied."""
        self._signals = Signals(definition)
        placing.inbox = self._signals.inbox

    def run(self) -> None:
        """Look for work, and do it."""
        self._keeping.start()
        while not self._stop_event.wait(POLL):
            try:
                with Catalog.open(self._definition.catalog.url) as catalog:
                    self._serve(catalog)
            except CatalogUnavailable as exc:
                log.warning("catalog is unreachable", code=exc.code)
        self._keeping.join()

    def _serve(self, catalog: Catalog) -> None:
        while not self._stop_event.wait(POLL):
            self._signals.serve(catalog)
            self._ask_for_copies(catalog)
            for command in catalog.commands.pending(self._definition.name, BACKFILL):
                # without a stream there is nothing to place into, nor does anybody know the tables
                if self._may_begin(catalog, command) and self._placing.versions():
                    self._carry_out(catalog, command)
            self._end_when_copied(catalog)

    def _end_when_copied(self, catalog: Catalog) -> None:
        """Let the reader end, if it is there for the copy alone and that is done."""
        if self._definition.snapshot.mode is not SnapshotMode.INITIAL_ONLY:
            return
        versions = self._placing.versions()
        waiting = catalog.commands.pending(self._definition.name, BACKFILL)
        if versions and not waiting and all(s.state is not TableState.SNAPSHOTTING for s in versions):
            log.info("all tables are copied: the reader ends")
            if self.at_end is not None:
                self.at_end()
            self._stop_event.set()

    def _ask_for_copies(self, catalog: Catalog) -> None:
        """Post what the log says has to be copied and nobody has asked for, once per epoch."""
        versions = self._placing.versions()
        # of a name that two have, one is gone, and will be marked in a moment
        wanted = {s.topic for s in versions if s.state is TableState.SNAPSHOTTING} - duplicate_topics(versions)
        if not wanted:
            return
        epoch = self._placing.reached.position.epoch
        for command in catalog.commands.ls(self._definition.name, BACKFILL):
            asked = BackfillRequest.from_json(command.payload)
            ended_in = (command.result or {}).get("epoch", asked.epoch)
            given_up = command.state is CommandState.FAILED and ended_in == epoch
            if asked.resync and (given_up or command.state is CommandState.PENDING):
                wanted = {topic for topic in wanted if not matches(topic, asked.tables)}
        if wanted:
            request = BackfillRequest(tuple(escape(topic) for topic in sorted(wanted)), resync=True, epoch=epoch)
            catalog.commands.post(self._definition.name, BACKFILL, request.to_json())

    def _may_begin(self, catalog: Catalog, command: Command) -> bool:
        was = (command.result or {}).get("state") == "paused"  # a restarted reader leaves it so
        self._paused.setdefault(command.id, was)
        if not (cancelled := self._heard(catalog, command.id)) and not self._paused[command.id]:
            return True
        work = BackfillState.from_json(command.result)
        work.state = "cancelled" if cancelled else "paused"
        if cancelled:
            self._give_up(catalog, command.id, work)
        elif command.result != work.to_json():
            catalog.commands.record(command.id, work.to_json())
        return False

    def _carry_out(self, catalog: Catalog, command: Command) -> None:
        request, work = BackfillRequest.from_json(command.payload), BackfillState.from_json(command.result)
        log.info("backfill begins", id=command.id, tables=list(request.tables), sink=request.sink)
        try:
            self._backfill(catalog, command.id, request, work)
        except CopyStopped:
            if not self._stop_event.is_set():
                work.state = "cancelled"
                self._give_up(catalog, command.id, work)
            return
        except CdcError as exc:
            log.warning("backfill stopped", id=command.id, code=exc.code, message=exc.message, fix=exc.fix)
            if exc.reaction is not Reaction.RETRY:
                work.state = "failed"
                self._give_up(catalog, command.id, work, exc)
            return  # otherwise it goes on at the next look
        catalog.commands.finish(command.id, work.to_json())
        log.info("backfill done", id=command.id, rows=sum(table.rows for table in work.tables.values()))

    def _give_up(self, catalog: Catalog, job: int, work: BackfillState, exc: CdcError | None = None) -> None:
        """Finish it without its end; its tables are not copied again in this epoch before somebody asks for that."""
        error = {} if exc is None else {"error": exc.to_json()}
        epoch = self._placing.reached.position.epoch
        catalog.commands.finish(job, {**work.to_json(), **error, "epoch": epoch}, ok=False)

    def _backfill(self, catalog: Catalog, job: int, request: BackfillRequest, work: BackfillState) -> None:
        definition, source = self._definition, self._definition.source
        root = definition.log.root
        known = {schema.relation: schema for schema in self._placing.versions()}
        tables = check_request(request, known, {sink.name: sink for sink in definition.sinks})
        dsn = source.current_dsn()
        with ExitStack() as opened:
            conns = [
                opened.enter_context(connect(dsn, application_name="cdc backfill"))
                for _ in range(definition.snapshot.parallel)
            ]
            telling = opened.enter_context(connect(source.current_primary(), application_name="cdc watermarks"))
            stream = ChunkSender(telling, self._placing, self._stop_event)
            around = CopyContext(
                stream=stream,
                publication=source.publication.name,
                mend=copy_text_repair(dsn, source.undecodable),
                limits=_limits(definition.snapshot),
                pace=CopyRateLimit(request.rate, definition.snapshot.max_source_load, stream, self._stop_event),
                gate=PauseGate(),
                in_hand=definition.snapshot.parallel + CHUNKS_AHEAD,
                log=root,
                stop=self._stop_event,
            )
            office = BackfillControl(
                verdict=lambda: self._verdict(catalog, job),
                record=lambda so_far: catalog.commands.record(job, so_far.to_json()),
                count=lambda topic, rows: self._figures.add(metrics.SNAPSHOT_ROWS, rows, definition.name, topic),
            )
            self._wait_for(self._placing.track(on=True))
            try:
                self._placing.add_received(unconfirmed_xids(conns[0], root))
                Backfill(request, work, conns, around, office).run(tables)
            finally:
                self._placing.track(on=False)

    def _wait_for(self, received: Position) -> None:
        """Wait until the log holds what was received before anybody noted it."""
        while not self._placing.reached.wait(received, POLL / 10):
            if self._stop_event.is_set():
                raise CopyStopped

    def _verdict(self, catalog: Catalog, job: int) -> BackfillDirective:
        if self._stop_event.is_set() or self._heard(catalog, job):
            return BackfillDirective.END
        return BackfillDirective.PAUSE if self._paused.get(job) else BackfillDirective.GO_ON

    def _heard(self, catalog: Catalog, job: int) -> bool:
        """Take in what was said about the job; whether it is cancelled."""
        self._signals.serve(catalog)
        cancelled = False
        pending = (catalog.commands.pending(self._definition.name, verb.kind) for verb in BackfillAction)
        for said in sorted(chain.from_iterable(pending), key=attrgetter("id")):
            if said.payload.get("id") == job:
                catalog.commands.finish(said.id, {})
                cancelled = cancelled or said.kind == BackfillAction.CANCEL.kind
                self._paused[job] = said.kind == BackfillAction.PAUSE.kind
        return cancelled


def _limits(snapshot: Snapshot) -> ChunkLimits:
    return ChunkLimits(snapshot.chunk_rows, CHUNK_MEMORY // (snapshot.parallel + CHUNKS_AS_ROWS))
