"""Routes that start and control jobs: backfills, resyncs, replays and verifications.

The command line has a command for each route.

The code that reads the log and the source is imported with the first request that needs it, because the import takes a
second and 100 MB. A server that only shows a pipeline does not need this code.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from cdc.errors import ConfigError, UnknownName
from cdc.service.api.route_context import (
    ACCEPTED,
    Actor,
    Context,
    EmptyBody,
    JobPath,
    RequestBody,
    RouteContext,
    SinkPath,
    TablePath,
    Text,
)
from cdc.service.background_jobs import ReplayRequest, ReplayStatus, VerifyRequest, VerifyStatus
from cdc.service.verification_status import VerificationStatus, VerifiedStatus
from cdc.snapshot import backfill_documents
from cdc.snapshot.backfill_status import BackfillStatus, find_backfill, list_backfills
from cdc.table import exact_glob
from cdc.verify_and_replay_options import Against, VerifyMode

EndedQuery = Annotated[int, Query(description="Maximum number of ended backfills to list.", ge=0, le=1000)]


class BackfillBody(RequestBody):
    """Body of a request for a backfill: the rows to read again, and how to read them."""

    tables: Annotated[list[Text], Field(min_length=1, max_length=1000)]
    """Tables to read, as globs of `schema.table`."""
    where: Text | None = None
    """SQL condition that selects the rows; Postgres evaluates it in a read-only transaction."""
    first: list[str] | None = None
    """First key of the range to read, as one text per key column; the range includes this key."""
    last: list[str] | None = None
    """Last key of the range to read, as one text per key column; the range includes this key."""
    keys: Annotated[list[list[str]], Field(max_length=backfill_documents.KEYS)] | None = None
    """Keys to read in one table, as one text per key column; the sinks delete keys that have no row at the source."""
    sink: str | None = None
    """Name of the only sink that gets the rows; null means all sinks."""
    rate: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of rows to read per second."""


class ResyncBody(RequestBody):
    """Body of a request for a resync: options of the full copy of a table."""

    rate: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of rows to read per second."""


class ReplayBody(RequestBody):
    """Body of a request for a replay: what to rebuild, and from which range of the log.

    The new target replaces the target of the sink. To write the new target to another path, use `cdc replay --into`.
    """

    start: Text = Field(default="beginning", alias="from")
    """Start of the range of the log: a position, an ISO 8601 time, or `beginning`."""
    end: Text = Field(default="latest", alias="to")
    """End of the range of the log: a position, an ISO 8601 time, or `latest`."""
    tables: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    """Tables to rebuild, as globs of `schema.table`; empty means all tables."""
    dry_run: bool = False
    """True to report rows, bytes and expected time of the replay, and to change nothing."""


class VerifyBody(RequestBody):
    """Body of a request for a verification; `{}` compares every row of every sink with the source."""

    tables: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    """Tables to compare, as globs of `schema.table`; empty means all tables."""
    sinks: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    """Names of the sinks to compare; empty means all sinks."""
    mode: VerifyMode = VerifyMode.ROWS
    """What to compare: rows | checksum | count."""
    against: Against = Against.SOURCE
    """Where the expected rows come from: source | log."""
    repair: bool = False
    """True to read differing rows from the source again by key, and then to compare these rows once more."""


@dataclass(frozen=True, slots=True)
class SkipRequest:
    """An accepted request to mark a table as complete without a copy."""

    id: int
    """Number of the command."""
    table: str


@dataclass(frozen=True, slots=True)
class VerificationBody:
    """Verification results of the pipeline's tables, and the newest verification job."""

    tables: tuple[VerifiedStatus, ...]
    """One result per table and sink; a table that was never compared with the source has none."""
    verification: VerificationStatus | None
    """What the continuous verification does."""
    last: VerifyStatus | None
    """The newest verification that was started over the API; null if there is none."""


routes = APIRouter(prefix="/pipelines/{pipeline}")
"""The routes about backfills, resyncs, replays and verifications."""


@routes.post("/backfills", tags=["backfills"], status_code=ACCEPTED)
def backfill(context: Context, body: BackfillBody, actor: Actor) -> BackfillStatus:
    """Start a backfill (`cdc backfill`); 409 if a pending backfill already has one of the tables."""
    wanted = backfill_documents.BackfillRequest(
        tables=tuple(body.tables),
        where=body.where,
        first=None if body.first is None else tuple(body.first),
        last=None if body.last is None else tuple(body.last),
        sink=body.sink,
        rate=body.rate,
        keys=None if body.keys is None else tuple(map(tuple, body.keys)),
    )
    return _request_backfill(context, wanted, actor)


@routes.get("/backfills", tags=["backfills"])
def backfills(context: Context, ended: EndedQuery = 100) -> list[BackfillStatus]:
    """Return the pending backfills and the backfills that ended last, newest first (`cdc backfill ls`)."""
    return list_backfills(context.catalog, context.name, ended)


@routes.get("/backfills/{job}", tags=["backfills"])
def backfill_of(context: Context, job: JobPath) -> BackfillStatus:
    """Return the progress of a backfill, table by table (`cdc backfill show`)."""
    return find_backfill(context.catalog, context.name, job)


@routes.post("/tables/{table:path}/resync", tags=["backfills"], status_code=ACCEPTED)
def resync(context: Context, table: TablePath, body: ResyncBody, actor: Actor) -> BackfillStatus:
    """Copy a whole table again (`cdc tables resync`); sinks also delete rows that the source no longer has."""
    context.check_table(table)
    whole = backfill_documents.BackfillRequest((exact_glob(table),), rate=body.rate, resync=True)
    return _request_backfill(context, whole, actor)


@routes.post("/tables/{table:path}/skip", tags=["backfills"], status_code=ACCEPTED)
def skip(context: Context, table: TablePath, _body: EmptyBody, actor: Actor) -> SkipRequest:
    """Mark a table as complete without a copy (`cdc tables skip`); 409 if the table is live or being copied.

    The definition file determines which tables are captured. Only `cdc tables add` and `cdc tables remove` edit
    that file.
    """
    context.check_table(table)
    number, _ = _reader_commands().request_skip(context.definition, context.catalog, [exact_glob(table)], actor)
    return SkipRequest(number, table)


@routes.post("/backfills/{job}/pause", tags=["backfills"], status_code=ACCEPTED)
def pause(context: Context, job: JobPath, _body: EmptyBody, actor: Actor) -> BackfillStatus:
    """Pause a backfill after its current chunk (`cdc backfill pause`); 409 if the backfill has ended."""
    return _send_action(context, job, "pause", actor)


@routes.post("/backfills/{job}/resume", tags=["backfills"], status_code=ACCEPTED)
def resume(context: Context, job: JobPath, _body: EmptyBody, actor: Actor) -> BackfillStatus:
    """Resume a paused backfill (`cdc backfill resume`); 409 if the backfill has ended."""
    return _send_action(context, job, "resume", actor)


@routes.post("/backfills/{job}/cancel", tags=["backfills"], status_code=ACCEPTED)
def cancel(context: Context, job: JobPath, _body: EmptyBody, actor: Actor) -> BackfillStatus:
    """Cancel a backfill after its current chunk (`cdc backfill cancel`); rows that it already sent stay."""
    return _send_action(context, job, "cancel", actor)


@routes.post("/sinks/{sink}/replay", tags=["replays"], status_code=ACCEPTED)
def replay(context: Context, sink: SinkPath, body: ReplayBody, actor: Actor) -> ReplayStatus:
    """Rebuild a sink from the log in a child process (`cdc replay`); 409 while another replay runs."""
    context.check_sink(sink)
    wanted = ReplayRequest(sink=sink, start=body.start, end=body.end, tables=body.tables, dry_run=body.dry_run)
    return context.replays.start(wanted, actor)


@routes.get("/sinks/{sink}/replay", tags=["replays"])
def replay_of(context: Context, sink: SinkPath) -> ReplayStatus:
    """Return the last replay of a sink, started over the API or submitted to a cluster; 404 if there is none."""
    context.check_sink(sink)
    last = context.replays.last(sink)
    if last is None:
        raise UnknownName(
            f"no replay of sink {sink!r} was started over the API or submitted to a cluster",
            remedy="send POST to the same path to start a replay",
        )
    return last


@routes.post("/verify", tags=["verify"], status_code=ACCEPTED)
def verify(context: Context, body: VerifyBody, actor: Actor) -> VerifyStatus:
    """Compare sinks with source or log in a child process (`cdc verify`); 409 while a verification runs."""
    for sink in body.sinks:
        context.check_sink(sink)
    if body.repair and body.against is Against.LOG:
        raise ConfigError(
            "'repair' reads rows from the source, but a verification against 'log' does not read the source",
            remedy="set 'against' to 'source', or set 'repair' to false",
        )
    wanted = VerifyRequest(
        tables=body.tables,
        sinks=body.sinks,
        mode=body.mode,
        against=body.against,
        repair=body.repair,
    )
    return context.verifications.start(wanted, actor)


@routes.get("/verify", tags=["verify"])
def verified(context: Context) -> VerificationBody:
    """Return the time up to which each table is verified (`cdc status`), and the last verification job."""
    status = context.sampler.status()
    return VerificationBody(status.verified, status.verification, context.verifications.last())


def _request_backfill(context: RouteContext, request: backfill_documents.BackfillRequest, actor: str) -> BackfillStatus:
    """Request a backfill or resync, and return its status."""
    job = _reader_commands().request_backfill(context.definition, context.catalog, request, actor)
    return find_backfill(context.catalog, context.name, job.id)


def _send_action(context: RouteContext, job: int, verb: str, actor: str) -> BackfillStatus:
    """Send pause, resume or cancel to a backfill, and return its status."""
    status: BackfillStatus = _reader_commands().send_action(
        context.catalog, context.name, job, backfill_documents.BackfillAction(verb), actor
    )
    return status


def _reader_commands() -> Any:
    return import_module("cdc.snapshot.reader_commands")
