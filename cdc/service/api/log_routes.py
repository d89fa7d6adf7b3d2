"""Routes about the log: its contents, consumers, compaction, vacuum and check.

The command line has a command for each route.

The code that reads the log is imported with the first request that needs it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request

from cdc.catalog.commands import COMPACT
from cdc.errors import StateConflict, UnknownName
from cdc.service.api.route_context import (
    ACCEPTED,
    EmptyBody,
    JobPath,
    PipelinePath,
    RequestBody,
    RouteContext,
    actor_of,
)
from cdc.service.log_status_records import (
    ConsumerLine,
    FileLine,
    LogCheck,
    LogStatus,
    SegmentLine,
    Transaction,
    VacuumReport,
)

MAX_BYTES: Final = 1 << 28
"""Maximum number of bytes of data files that one check reads; reading them takes a few seconds."""
MAX_ROWS: Final = 10_000
"""Maximum number of rows of a transaction in one response."""

SegmentPath = Annotated[int, Path(description="Number of the segment.", ge=0)]
RunPath = Annotated[int, Path(description="Number of the run.", ge=0)]
PositionQuery = Annotated[
    str, Query(description="Position as 16/B374D848, or 2:16/B374D848 in epoch 2.", max_length=40)
]
RowsQuery = Annotated[int, Query(description="Maximum number of rows to return.", ge=0, le=MAX_ROWS)]
MostQuery = Annotated[int, Query(description="Maximum bytes to read from the newest data files.", ge=0, le=MAX_BYTES)]


ConsumerPath = Annotated[str, Path(description="UUID of the consumer.")]


class CompactBody(RequestBody):
    """Body of a request to compact the log."""

    everything: bool = False
    """True to compact also the segment that is being written, up to the end of the log."""


class GcBody(RequestBody):
    """Body of a request for a vacuum of the log."""

    dry_run: bool = False
    """True to report what would be removed, and to remove nothing."""


@dataclass(frozen=True, slots=True)
class CompactionJob:
    """A requested compaction of the log, pending or ended."""

    id: int
    state: str
    """pending | done | failed."""
    summary: str | None
    """Result in one line; None until the compaction is done."""
    error: dict[str, Any] | None
    """Code, message and suggestion; None unless the compaction failed."""


@dataclass(frozen=True, slots=True)
class ConsumerForgotten:
    """A forgotten consumer: retention no longer waits for it."""

    uuid: str
    name: str


def log_routes(context: RouteContext) -> APIRouter:
    """Return a router with the routes about the log."""
    routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["log"])
    for add in (_add_status, _add_inspect, _add_verify, _add_compact, _add_gc, _add_consumers):
        add(routes, context)
    return routes


def _add_status(routes: APIRouter, context: RouteContext) -> None:
    @routes.get("/log")
    def log(pipeline: PipelinePath) -> LogStatus:
        """Return the status of the log: sizes, segments, runs, positions, last compaction and consumers."""
        context.check_pipeline(pipeline)
        root, log = context.definition.log.root, _open_log(context)
        status: LogStatus = _status_reader().log_status(root, log, datetime.now(UTC))
        return status

    @routes.get("/log/segments")
    def segments(pipeline: PipelinePath) -> list[SegmentLine]:
        """Return every segment of the table `changes`, oldest first (`cdc log ls`)."""
        context.check_pipeline(pipeline)
        lines: list[SegmentLine] = _contents().segment_lines(_open_log(context))
        return lines

    @routes.get("/log/segments/{segment}/files")
    def files_of_segment(pipeline: PipelinePath, segment: SegmentPath) -> list[FileLine]:
        """Return the data files of a segment, in order of position (`cdc log ls --files`)."""
        context.check_pipeline(pipeline)
        lines: list[FileLine] = _contents().files_of_segment(_open_log(context), segment)
        return lines

    @routes.get("/log/runs/{run}/files")
    def files_of_run(pipeline: PipelinePath, run: RunPath) -> list[FileLine]:
        """Return the data files of a run of the compacted log (`cdc log ls --files`)."""
        context.check_pipeline(pipeline)
        lines: list[FileLine] = _contents().files_of_run(context.definition.log.root, _open_log(context), run)
        return lines


def _add_inspect(routes: APIRouter, context: RouteContext) -> None:
    @routes.get("/log/inspect")
    def inspect(pipeline: PipelinePath, position: PositionQuery, most: RowsQuery = 1_000) -> Transaction:
        """Return the rows of a transaction, without their values (`cdc log inspect POSITION`).

        404 if the log has no transaction at this position.
        """
        context.check_pipeline(pipeline)
        found: Transaction = _contents().read_transaction(_open_log(context), position, most)
        return found


def _add_compact(routes: APIRouter, context: RouteContext) -> None:
    @routes.post("/log/compact", status_code=ACCEPTED)
    def compact(pipeline: PipelinePath, body: CompactBody, request: Request) -> CompactionJob:
        """Ask the apply process to compact the log now (`cdc log compact`); 409 if no apply process runs."""
        context.check_pipeline(pipeline)
        number: int | None = _maintenance().request_compaction(context.catalog, pipeline, everything=body.everything)
        if number is None:
            raise StateConflict(
                "the log cannot be compacted: no apply process is running",
                remedy="start the apply process, or run 'cdc log compact'",
            )
        context.catalog.audit.write(actor_of(request), "log.compact", pipeline, {"everything": body.everything})
        return _compaction(context, pipeline, number)

    @routes.get("/log/compact/{job}")
    def compaction(pipeline: PipelinePath, job: JobPath) -> CompactionJob:
        """Return the state of a requested compaction."""
        context.check_pipeline(pipeline)
        return _compaction(context, pipeline, job)


def _add_gc(routes: APIRouter, context: RouteContext) -> None:
    @routes.post("/log/gc")
    def gc(pipeline: PipelinePath, body: GcBody, request: Request) -> VacuumReport:
        """Delete orphan files, and removed files after their grace period; ask the reader to trim (`cdc log gc`)."""
        context.check_pipeline(pipeline)
        collected: VacuumReport = _maintenance().vacuum_log(context.definition, dry_run=body.dry_run)
        if not body.dry_run:
            context.catalog.audit.write(actor_of(request), "log.gc", pipeline, asdict(collected))
        return collected


def _add_verify(routes: APIRouter, context: RouteContext) -> None:
    @routes.get("/log/verify")
    def verify(pipeline: PipelinePath, most: MostQuery = MAX_BYTES // 4) -> LogCheck:
        """Check all commits and files, and the rows of the newest files (`cdc log verify` reads all rows)."""
        context.check_pipeline(pipeline)
        check: LogCheck = _maintenance().check_log(context.definition, most)
        return check


def _add_consumers(routes: APIRouter, context: RouteContext) -> None:
    @routes.get("/consumers")
    def consumers(pipeline: PipelinePath) -> list[ConsumerLine]:
        """Return each consumer of the log with its position and the time of its last report (`cdc consumers ls`)."""
        context.check_pipeline(pipeline)
        lines: tuple[ConsumerLine, ...] = _status_reader().consumer_lines(
            context.definition.log.root, datetime.now(UTC)
        )
        return list(lines)

    @routes.post("/consumers/{uuid}/forget", status_code=ACCEPTED)
    def forget(pipeline: PipelinePath, uuid: ConsumerPath, _body: EmptyBody, request: Request) -> ConsumerForgotten:
        """Remove the registration of a consumer (`cdc consumers forget`); a running consumer registers again."""
        context.check_pipeline(pipeline)
        return _forget(context, uuid, actor_of(request))


def _compaction(context: RouteContext, pipeline: str, number: int) -> CompactionJob:
    found = context.catalog.commands.get(number)
    if found is None or found.kind != COMPACT or found.pipeline != pipeline:
        raise UnknownName(
            f"the pipeline has no compaction with the number {number}", remedy="send POST to /log/compact to start one"
        )
    result = found.result or {}
    return CompactionJob(number, found.state.value, result.get("summary"), result.get("error"))


def _forget(context: RouteContext, uuid: str, actor: str) -> ConsumerForgotten:
    root, consumers = context.definition.log.root, import_module("cdc.log.consumers")
    known, broken = consumers.list_readable_consumers(root)
    known_by_uuid = {consumer.uuid: (consumer.name, str(consumer.position)) for consumer in known}
    known_by_uuid |= {broken_uuid: (broken_uuid, None) for broken_uuid in broken}
    if uuid not in known_by_uuid:
        raise UnknownName(
            f"the log has no consumer with the UUID {uuid!r}",
            remedy=f"choose a UUID that GET /api/v1/pipelines/{context.definition.name}/consumers returns",
        )
    name, position = known_by_uuid[uuid]
    consumers.forget(root, uuid)
    context.catalog.audit.write(actor, "consumers.forget", name, {"uuid": uuid, "position": position})
    return ConsumerForgotten(uuid, name)


def _open_log(context: RouteContext) -> Any:
    return _contents().open_log(context.definition.log.root)


def _contents() -> Any:
    return import_module("cdc.service.log_contents")


def _maintenance() -> Any:
    return import_module("cdc.service.log_maintenance_requests")


def _status_reader() -> Any:
    return import_module("cdc.service.log_status_reader")
