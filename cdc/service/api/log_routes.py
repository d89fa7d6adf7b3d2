"""Routes about the log: its contents, consumers, compaction, vacuum and check.

The command line has a command for each route.

The code that reads the log is imported with the first request that needs it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query

from cdc.catalog.commands import COMPACT
from cdc.errors import StateConflict, UnknownName
from cdc.service.api.route_context import (
    ACCEPTED,
    Actor,
    Context,
    EmptyBody,
    JobPath,
    RequestBody,
    RouteContext,
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


routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["log"])
"""The routes about the log."""


@routes.get("/log")
def log(context: Context) -> LogStatus:
    """Return the status of the log: sizes, segments, runs, positions, last compaction and consumers."""
    root, log = context.definition.log.root, _open_log(context)
    status: LogStatus = _status_reader().log_status(root, log, datetime.now(UTC))
    return status


@routes.get("/log/segments")
def segments(context: Context) -> list[SegmentLine]:
    """Return every segment of the table `changes`, oldest first (`cdc log ls`)."""
    lines: list[SegmentLine] = _contents().segment_lines(_open_log(context))
    return lines


@routes.get("/log/segments/{segment}/files")
def files_of_segment(context: Context, segment: SegmentPath) -> list[FileLine]:
    """Return the data files of a segment, in order of position (`cdc log ls --files`)."""
    lines: list[FileLine] = _contents().files_of_segment(_open_log(context), segment)
    return lines


@routes.get("/log/runs/{run}/files")
def files_of_run(context: Context, run: RunPath) -> list[FileLine]:
    """Return the data files of a run of the compacted log (`cdc log ls --files`)."""
    lines: list[FileLine] = _contents().files_of_run(context.definition.log.root, _open_log(context), run)
    return lines


@routes.get("/log/inspect")
def inspect(context: Context, position: PositionQuery, most: RowsQuery = 1_000) -> Transaction:
    """Return the rows of a transaction, without their values (`cdc log inspect POSITION`).

    404 if the log has no transaction at this position.
    """
    found: Transaction = _contents().read_transaction(_open_log(context), position, most)
    return found


@routes.post("/log/compact", status_code=ACCEPTED)
def compact(context: Context, body: CompactBody, actor: Actor) -> CompactionJob:
    """Ask the apply process to compact the log now (`cdc log compact`); 409 if no apply process runs."""
    number: int | None = _maintenance().request_compaction(context.catalog, context.name, everything=body.everything)
    if number is None:
        raise StateConflict(
            "the log cannot be compacted: no apply process is running",
            remedy="start the apply process, or run 'cdc log compact'",
        )
    context.catalog.audit.write(actor, "log.compact", context.name, {"everything": body.everything})
    return _compaction(context, number)


@routes.get("/log/compact/{job}")
def compaction(context: Context, job: JobPath) -> CompactionJob:
    """Return the state of a requested compaction."""
    return _compaction(context, job)


@routes.post("/log/gc")
def gc(context: Context, body: GcBody, actor: Actor) -> VacuumReport:
    """Delete orphan files, and removed files after their grace period; ask the reader to trim (`cdc log gc`)."""
    collected: VacuumReport = _maintenance().vacuum_log(context.definition, dry_run=body.dry_run)
    if not body.dry_run:
        context.catalog.audit.write(actor, "log.gc", context.name, asdict(collected))
    return collected


@routes.get("/log/verify")
def verify(context: Context, most: MostQuery = MAX_BYTES // 4) -> LogCheck:
    """Check all commits and files, and the rows of the newest files (`cdc log verify` reads all rows)."""
    check: LogCheck = _maintenance().check_log(context.definition, most)
    return check


@routes.get("/consumers")
def consumers(context: Context) -> list[ConsumerLine]:
    """Return each consumer of the log with its position and the time of its last report (`cdc consumers ls`)."""
    lines: tuple[ConsumerLine, ...] = _status_reader().consumer_lines(context.definition.log.root, datetime.now(UTC))
    return list(lines)


@routes.post("/consumers/{uuid}/forget", status_code=ACCEPTED)
def forget(context: Context, uuid: ConsumerPath, _body: EmptyBody, actor: Actor) -> ConsumerForgotten:
    """Remove the registration of a consumer (`cdc consumers forget`); a running consumer registers again."""
    return _forget(context, uuid, actor)


def _compaction(context: RouteContext, number: int) -> CompactionJob:
    found = context.catalog.commands.get(number)
    if found is None or found.kind != COMPACT or found.pipeline != context.name:
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
            remedy=f"choose a UUID that GET /api/v1/pipelines/{context.name}/consumers returns",
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
