"""Routes about rows that are read or built again: backfills, resyncs, replays. Each has its command in `cdc`.

What reads the log and the source is loaded when somebody first asks for something: it takes a second and 100 MB, and
a server that only shows a pipeline needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from cdc.catalog import Catalog
from cdc.config import Definition
from cdc.errors import UnknownName
from cdc.service.replay_jobs import ReplayJobs, ReplayRequest, ReplayStatus
from cdc.snapshot import backfill_state
from cdc.snapshot.backfill_progress import BackfillStatus, find_backfill, list_backfills
from cdc.table import exact_glob

ACCEPTED = 202
"""It was taken on; the reader, or a child, does it."""

Text = Annotated[str, Field(min_length=1, max_length=10_000)]
PipelinePath = Annotated[str, Path(description="As the definition names it.")]
TablePath = Annotated[str, Path(description="`schema.table`, itself and no glob.")]
SinkPath = Annotated[str, Path(description="As the definition names it.")]
JobPath = Annotated[int, Path(description="Its number.", ge=0, lt=2**63)]
EndedQuery = Annotated[int, Query(description="How many of those that ended.", ge=0, le=1000)]


class RequestBody(BaseModel):
    """What every body has in common: nothing that we do not know is taken."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class BackfillBody(RequestBody):
    """Rows to read again."""

    tables: Annotated[list[Text], Field(min_length=1, max_length=1000)]
    """Globs of `schema.table`."""
    where: Text | None = None
    """Rows for which this holds, in the source's SQL; it is run read-only."""
    first: list[str] | None = None
    """The key to begin with, one text per column, included."""
    last: list[str] | None = None
    """The key to end with, included."""
    keys: Annotated[list[list[str]], Field(max_length=backfill_state.KEYS)] | None = None
    """Of one table, its rows with these keys, one text per column; keys without a row vanish from the sinks."""
    sink: str | None = None
    """For this sink alone; the others write nothing for it."""
    rate: Annotated[int, Field(ge=1)] | None = None
    """Rows per second at most."""


class ResyncBody(RequestBody):
    """How to copy a whole table again."""

    rate: Annotated[int, Field(ge=1)] | None = None
    """Rows per second at most."""


class EmptyBody(RequestBody):
    """Nothing: `{}`."""


class ReplayBody(RequestBody):
    """What to build anew from the log; a path of the server's to build it at is for the command line alone."""

    start: Text = Field(default="beginning", alias="from")
    """A position, an ISO 8601 time, or `beginning`."""
    end: Text = Field(default="latest", alias="to")
    """A position, an ISO 8601 time, or `latest`."""
    tables: Annotated[list[Text], Field(max_length=1000)] = []
    """Only these, globs of `schema.table`; none is all."""
    dry_run: bool = False
    """Say rows, bytes and expected time, and do nothing."""


@dataclass(frozen=True, slots=True)
class SkipRequest:
    """A request to skip a table that was taken on."""

    id: int
    """Of the command."""
    table: str


@dataclass(frozen=True, slots=True)
class PipelineApi:
    """Where requests of one pipeline are taken on."""

    catalog: Catalog
    definition: Definition
    replays: ReplayJobs

    def check_pipeline(self, pipeline: str) -> None:
        """Raise UnknownName for a pipeline that another server serves, or none."""
        if pipeline != self.definition.name:
            raise UnknownName(
                f"this server serves {self.definition.name!r}, not {pipeline!r}",
                remedy="ask the server of that pipeline",
            )

    def check_sink(self, pipeline: str, sink: str) -> None:
        """Raise UnknownName for a sink that the definition does not have."""
        self.check_pipeline(pipeline)
        names = [known.name for known in self.definition.sinks]
        if sink not in names:
            listed = ", ".join(map(repr, names)) or "none"
            raise UnknownName(f"no sink is called {sink!r}", remedy=f"sinks of this pipeline: {listed}")

    def check_table(self, pipeline: str, table: str) -> None:
        """Raise UnknownName for a table that the log does not know."""
        self.check_pipeline(pipeline)
        if table not in import_module("cdc.service.table_status").tables_by_topic(self.definition.log.root):
            raise UnknownName(
                f"no table of the log is called {table!r}", remedy=f"GET /api/v1/pipelines/{pipeline}/tables"
            )

    def request_backfill(self, request: backfill_state.BackfillRequest, actor: str) -> BackfillStatus:
        """Ask for it, and say how it stands."""
        job = _backfill_requests().request_backfill(self.definition, self.catalog, request, actor)
        return find_backfill(self.catalog, self.definition.name, job.id)

    def skip(self, table: str, actor: str) -> SkipRequest:
        """Ask the reader to take a table for exact as it is."""
        request_skip = import_module("cdc.snapshot.table_requests").request_skip
        job, _ = request_skip(self.definition, self.catalog, [exact_glob(table)], actor)
        return SkipRequest(job, table)

    def send_action(self, pipeline: str, job: int, verb: str, actor: str) -> BackfillStatus:
        """Tell the reader something about a backfill, and say how it stands."""
        self.check_pipeline(pipeline)
        status: BackfillStatus = _backfill_requests().send_action(
            self.catalog, pipeline, job, backfill_state.BackfillAction(verb), actor
        )
        return status


def copy_routes(api: PipelineApi) -> APIRouter:
    """Every route of this module."""
    routes = APIRouter(prefix="/pipelines/{pipeline}")
    routes.include_router(_backfill_routes(api))
    routes.include_router(_backfill_action_routes(api))
    routes.include_router(_replay_routes(api))
    return routes


def _backfill_routes(api: PipelineApi) -> APIRouter:
    routes = APIRouter(tags=["backfills"])

    @routes.post("/backfills", status_code=ACCEPTED)
    def backfill(pipeline: PipelinePath, body: BackfillBody, request: Request) -> BackfillStatus:
        """Read rows again and place them into the stream (`cdc backfill`); 409 if a table of it is in another one."""
        api.check_pipeline(pipeline)
        wanted = backfill_state.BackfillRequest(
            tables=tuple(body.tables),
            where=body.where,
            first=None if body.first is None else tuple(body.first),
            last=None if body.last is None else tuple(body.last),
            sink=body.sink,
            rate=body.rate,
            keys=None if body.keys is None else tuple(map(tuple, body.keys)),
        )
        return api.request_backfill(wanted, actor_of(request))

    @routes.get("/backfills")
    def backfills(pipeline: PipelinePath, ended: EndedQuery = 100) -> list[BackfillStatus]:
        """Those on their way and the newest that ended, newest first (`cdc backfill ls`)."""
        api.check_pipeline(pipeline)
        return list_backfills(api.catalog, pipeline, ended)

    @routes.get("/backfills/{job}")
    def backfill_of(pipeline: PipelinePath, job: JobPath) -> BackfillStatus:
        """How far one has come, table by table (`cdc backfill show`)."""
        api.check_pipeline(pipeline)
        return find_backfill(api.catalog, pipeline, job)

    @routes.post("/tables/{table:path}/resync", status_code=ACCEPTED)
    def resync(pipeline: PipelinePath, table: TablePath, body: ResyncBody, request: Request) -> BackfillStatus:
        """Copy a whole table again (`cdc tables resync`): what vanished unseen vanishes from every sink."""
        api.check_table(pipeline, table)
        return api.request_backfill(
            backfill_state.BackfillRequest((exact_glob(table),), rate=body.rate, resync=True), actor_of(request)
        )

    @routes.post("/tables/{table:path}/skip", status_code=ACCEPTED)
    def skip(pipeline: PipelinePath, table: TablePath, _body: EmptyBody, request: Request) -> SkipRequest:
        """Take a table for exact as it is, without a copy (`cdc tables skip`); 409 if it is live or being copied.

        Which tables are captured stands in the definition, a file that `cdc tables add` and `remove` change where the
        pipeline runs; nothing here does.
        """
        api.check_table(pipeline, table)
        return api.skip(table, actor_of(request))

    return routes


def _backfill_action_routes(api: PipelineApi) -> APIRouter:
    routes = APIRouter(prefix="/backfills/{job}", tags=["backfills"])

    @routes.post("/pause", status_code=ACCEPTED)
    def pause(pipeline: PipelinePath, job: JobPath, _body: EmptyBody, request: Request) -> BackfillStatus:
        """Let it rest after the chunk that is on its way (`cdc backfill pause`); 409 once it has ended."""
        return api.send_action(pipeline, job, "pause", actor_of(request))

    @routes.post("/resume", status_code=ACCEPTED)
    def resume(pipeline: PipelinePath, job: JobPath, _body: EmptyBody, request: Request) -> BackfillStatus:
        """Let it go on (`cdc backfill resume`); 409 once it has ended."""
        return api.send_action(pipeline, job, "resume", actor_of(request))

    @routes.post("/cancel", status_code=ACCEPTED)
    def cancel(pipeline: PipelinePath, job: JobPath, _body: EmptyBody, request: Request) -> BackfillStatus:
        """End it after the chunk that is on its way; what was placed stays (`cdc backfill cancel`)."""
        return api.send_action(pipeline, job, "cancel", actor_of(request))

    return routes


def _replay_routes(api: PipelineApi) -> APIRouter:
    routes = APIRouter(prefix="/sinks/{sink}", tags=["replays"])

    @routes.post("/replay", status_code=ACCEPTED)
    def replay(pipeline: PipelinePath, sink: SinkPath, body: ReplayBody, request: Request) -> ReplayStatus:
        """Build the sink's target anew from the log, in a child of this server (`cdc replay`); 409 while one runs."""
        api.check_sink(pipeline, sink)
        wanted = ReplayRequest(
            sink=sink, start=body.start, end=body.end, tables=tuple(body.tables), dry_run=body.dry_run
        )
        return api.replays.start(wanted, actor_of(request))

    @routes.get("/replay")
    def replay_of(pipeline: PipelinePath, sink: SinkPath) -> ReplayStatus:
        """The last replay of the sink, asked for here or submitted to a cluster, running or ended; 404 without one."""
        api.check_sink(pipeline, sink)
        last = api.replays.last(sink)
        if last is None:
            raise UnknownName(
                f"nobody asked here for a replay of {sink!r}", remedy="POST to the same path asks for one"
            )
        return last

    return routes


def actor_of(request: Request) -> str:
    """For the audit: who asked, as far as we know."""
    return "api" if request.client is None else f"api from {request.client.host}"


def _backfill_requests() -> Any:
    return import_module("cdc.snapshot.backfill_requests")
