"""Jobs: carries out the backfills that the catalog asks for, oldest first, one at a time, beside the stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Final

import structlog

from cdc import metrics
from cdc.catalog import Catalog
from cdc.catalog.commands import Command
from cdc.config import Definition
from cdc.errors import CatalogUnavailable, CdcError, Reaction
from cdc.log.read import LogReader
from cdc.mending import line_mender
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.snapshot.backfill import Backfill, Stopped, Surroundings
from cdc.snapshot.placing import Placing
from cdc.snapshot.received import hidden_in_log
from cdc.snapshot.work import Request, Work, check_request

BACKFILL: Final = "backfill"
"""The kind of command that asks for one; its result is the work so far."""
PAUSE: Final = "backfill.pause"
RESUME: Final = "backfill.resume"
CANCEL: Final = "backfill.cancel"
"""Kinds of commands about one; the payload names it as `id`."""
POLL: Final = 0.5
"""Seconds between two looks at the catalog."""

log = structlog.get_logger("backfill")


class Jobs(Thread):
    """Runs until stop is set; a source or a catalog that is away is waited for."""

    def __init__(self, definition: Definition, placing: Placing, figures: metrics.Figures, stop: Event) -> None:
        super().__init__(name="jobs", daemon=True)
        self._definition, self._placing, self._figures, self._stop_event = definition, placing, figures, stop
        self._paused: set[int] = set()

    def run(self) -> None:
        """Look for work, and do it."""
        while not self._stop_event.wait(POLL):
            try:
                with Catalog.open(self._definition.catalog.url) as catalog:
                    self._serve(catalog)
            except CatalogUnavailable as exc:
                log.warning("catalog is unreachable", code=exc.code)

    def _serve(self, catalog: Catalog) -> None:
        while not self._stop_event.wait(POLL):
            for command in catalog.commands.pending(self._definition.name, BACKFILL):
                if self._may_begin(catalog, command):
                    self._carry_out(catalog, command)

    def _may_begin(self, catalog: Catalog, command: Command) -> bool:
        if not (cancelled := self._heard(catalog, command.id)) and command.id not in self._paused:
            return True
        work = Work.from_json(command.result)
        work.state = "cancelled" if cancelled else "paused"
        if cancelled:
            catalog.commands.finish(command.id, work.to_json(), ok=False)
        elif command.result != work.to_json():
            catalog.commands.record(command.id, work.to_json())
        return False

    def _carry_out(self, catalog: Catalog, command: Command) -> None:
        request, work = Request.from_json(command.payload), Work.from_json(command.result)
        log.info("backfill begins", id=command.id, tables=list(request.tables), sink=request.sink)
        try:
            self._backfill(catalog, command.id, request, work)
        except Stopped:
            if not self._stop_event.is_set():
                work.state = "cancelled"
                catalog.commands.finish(command.id, work.to_json(), ok=False)
            return
        except CdcError as exc:
            log.warning("backfill stopped", id=command.id, code=exc.code, message=exc.message, fix=exc.fix)
            if exc.reaction is not Reaction.RETRY:
                said = {"code": exc.code, "message": exc.message, "suggestion": exc.fix}
                work.state = "failed"
                catalog.commands.finish(command.id, work.to_json() | {"error": said}, ok=False)
            return  # otherwise it goes on at the next look
        catalog.commands.finish(command.id, work.to_json())
        log.info("backfill done", id=command.id, rows=sum(table.rows for table in work.tables.values()))

    def _backfill(self, catalog: Catalog, job: int, request: Request, work: Work) -> None:
        source, root = self._definition.source, Path(self._definition.log.path)
        sinks = {sink.name: sink for sink in self._definition.sinks}
        tables = check_request(request, LogReader(root).schemas(), sinks)
        dsn = source.current_dsn()
        telling_dsn = dsn if source.primary is None else source.primary.reveal()
        with (
            connect(dsn, application_name="cdc backfill") as conn,
            connect(telling_dsn, application_name="cdc watermarks") as telling,
        ):
            around = Surroundings(
                pipeline=self._definition.name,
                conn=conn,
                telling=telling,
                publication=source.publication.name,
                placing=self._placing,
                figures=self._figures,
                mend=line_mender(dsn, source.undecodable),
                may_go_on=self._asker(catalog, job, work),
                record=lambda so_far: catalog.commands.record(job, so_far.to_json()),
                stop=self._stop_event,
            )
            self._wait_for(self._placing.track(on=True))
            try:
                self._placing.add_received(hidden_in_log(conn, root))
                Backfill(request, work, around).run(tables)
            finally:
                self._placing.track(on=False)

    def _wait_for(self, received: Position) -> None:
        """Wait until the log holds what was received before anybody noted it."""
        while (self._figures.value(metrics.LOG_POSITION, self._definition.name) or 0.0) < received:
            if self._stop_event.wait(POLL / 10):
                raise Stopped

    def _asker(self, catalog: Catalog, job: int, work: Work) -> Callable[[], bool]:
        """Waits while the job is paused; False once it is cancelled or the reader stops."""

        def may_go_on() -> bool:
            while not self._stop_event.is_set():
                if self._heard(catalog, job):
                    return False
                if job not in self._paused:
                    work.state = "snapshotting"
                    return True
                if work.state != "paused":
                    work.state = "paused"
                    catalog.commands.record(job, work.to_json())
                self._stop_event.wait(POLL)
            return False

        return may_go_on

    def _heard(self, catalog: Catalog, job: int) -> bool:
        """Take in what was said about the job; whether it is cancelled."""
        cancelled = False
        for kind in (PAUSE, RESUME, CANCEL):
            for said in catalog.commands.pending(self._definition.name, kind):
                if said.payload.get("id") != job:
                    continue
                catalog.commands.finish(said.id, {})
                cancelled = cancelled or kind == CANCEL
                (self._paused.add if kind == PAUSE else self._paused.discard)(job)
        return cancelled
