"""Routes that copy or rebuild rows: backfills, resyncs, replays. Each has its command in `cdc`.

The code that reads the log and the source is loaded on the first such request: it takes a second and 100 MB, which a
server that only shows a pipeline does not need.
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
"""The request is accepted; the reader, or a child process, does the work."""

Text = Annotated[str, Field(min_length=1, max_length=10_000)]
PipelinePath = Annotated[str, Path(description="Name of the pipeline in the definition.")]
TablePath = Annotated[str, Path(description="Table as `schema.table`, not a glob.")]
SinkPath = Annotated[str, Path(description="Name of the sink in the definition.")]
JobPath = Annotated[int, Path(description="Number of the job.", ge=0, lt=2**63)]
EndedQuery = Annotated[int, Query(description="Number of ended backfills to list at most.", ge=0, le=1000)]


class RequestBody(BaseModel):
    """Base of every body: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class BackfillBody(RequestBody):
    """Rows to read again."""

    tables: Annotated[list[Text], Field(min_length=1, max_length=1000)]
    """Globs of `schema.table`."""
    where: Text | None = None
    """SQL condition of the source; it runs in a read-only transaction."""
    first: list[str] | None = None
    """First key to read, one text per column, included."""
    last: list[str] | None = None
    """Last key to read, included."""
    keys: Annotated[list[list[str]], Field(max_length=backfill_state.KEYS)] | None = None
    """Keys to read in one table, one text per column; keys without a row are deleted from the sinks."""
    sink: str | None = None
    """Write the rows to this sink only."""
    rate: Annotated[int, Field(ge=1)] | None = None
    """Rows per second to read at most."""


class ResyncBody(RequestBody):
    """Options of a full copy of a table."""

    rate: Annotated[int, Field(ge=1)] | None = None
    """Rows per second to read at most."""


class EmptyBody(RequestBody):
    """An empty body: `{}`."""


class ReplayBody(RequestBody):
    """What to rebuild from the log; only the command line may choose another target path."""

    start: Text = Field(default="beginning", alias="from")
    """A position, an ISO 8601 time, or `beginning`."""
    end: Text = Field(default="latest", alias="to")
    """A position, an ISO 8601 time, or `latest`."""
    tables: Annotated[list[Text], Field(max_length=1000)] = []
    """Globs of `schema.table`; empty means all."""
    dry_run: bool = False
    """Report rows, bytes and expected time, and change nothing."""


@dataclass(frozen=True, slots=True)
class SkipRequest:
    """An accepted request to skip a table."""

    id: int
    """Number of the command."""
    table: str


@dataclass(frozen=True, slots=True)
class PipelineApi:
    """What the routes of one pipeline share: its catalog, definition and checks of names."""

    catalog: Catalog
    definition: Definition
    replays: ReplayJobs

    def check_pipeline(self, pipeline: str) -> None:
        """Raise UnknownName for a pipeline that this server does not serve."""
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
        """Raise UnknownName for a table that the log does not have."""
        self.check_pipeline(pipeline)
        if table not in import_module("cdc.service.table_status").tables_by_topic(self.definition.log.root):
            raise UnknownName(
                f"no table of the log is called {table!r}", remedy=f"GET /api/v1/pipelines/{pipeline}/tables"
            )

    def request_backfill(self, request: backfill_state.BackfillRequest, actor: str) -> BackfillStatus:
        """Request a backfill or resync, and return its status."""
        job = _backfill_requests().request_backfill(self.definition, self.catalog, request, actor)
        return find_backfill(self.catalog, self.definition.name, job.id)

    def skip(self, table: str, actor: str) -> SkipRequest:
        """Ask the reader to mark a table as complete without a copy."""
        request_skip = import_module("cdc.snapshot.table_requests").request_skip
        job, _ = request_skip(self.definition, self.catalog, [exact_glob(table)], actor)
        return SkipRequest(job, table)

    def send_action(self, pipeline: str, job: int, verb: str, actor: str) -> BackfillStatus:
        """Send pause, resume or cancel to a backfill, and return its status."""
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
        """Read rows again and merge them into the stream (`cdc backfill`); 409 if another one has a table of it."""
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
        """Running backfills and the newest ended ones, newest first (`cdc backfill ls`)."""
        api.check_pipeline(pipeline)
        return list_backfills(api.catalog, pipeline, ended)

    @routes.get("/backfills/{job}")
    def backfill_of(pipeline: PipelinePath, job: JobPath) -> BackfillStatus:
        """Progress of a backfill, table by table (`cdc backfill show`)."""
        api.check_pipeline(pipeline)
        return find_backfill(api.catalog, pipeline, job)

    @routes.post("/tables/{table:path}/resync", status_code=ACCEPTED)
    def resync(pipeline: PipelinePath, table: TablePath, body: ResyncBody, request: Request) -> BackfillStatus:
        """Copy a whole table again (`cdc tables resync`); sinks also delete rows that the source deleted unseen."""
        api.check_table(pipeline, table)
        return api.request_backfill(
            backfill_state.BackfillRequest((exact_glob(table),), rate=body.rate, resync=True), actor_of(request)
        )

    @routes.post("/tables/{table:path}/skip", status_code=ACCEPTED)
    def skip(pipeline: PipelinePath, table: TablePath, _body: EmptyBody, request: Request) -> SkipRequest:
        """Mark a table as complete without a copy (`cdc tables skip`); 409 if it is live or being copied.

        The definition says which tables are captured. `cdc tables add` and `remove` edit that file; the API does not.
        """
        api.check_table(pipeline, table)
        return api.skip(table, actor_of(request))

    return routes


def _backfill_action_routes(api: PipelineApi) -> APIRouter:
    routes = APIRouter(prefix="/backfills/{job}", tags=["backfills"])

    @routes.post("/pause", status_code=ACCEPTED)
    def pause(pipeline: PipelinePath, job: JobPath, _body: EmptyBody, request: Request) -> BackfillStatus:
        """Pause a backfill after its current chunk (`cdc backfill pause`); 409 once it has ended."""
        return api.send_action(pipeline, job, "pause", actor_of(request))

    @routes.post("/resume", status_code=ACCEPTED)
    def resume(pipeline: PipelinePath, job: JobPath, _body: EmptyBody, request: Request) -> BackfillStatus:
        """Resume a paused backfill (`cdc backfill resume`); 409 once it has ended."""
        return api.send_action(pipeline, job, "resume", actor_of(request))

    @routes.post("/cancel", status_code=ACCEPTED)
    def cancel(pipeline: PipelinePath, job: JobPath, _body: EmptyBody, request: Request) -> BackfillStatus:
        """Cancel a backfill after its current chunk; rows already sent stay (`cdc backfill cancel`)."""
        return api.send_action(pipeline, job, "cancel", actor_of(request))

    return routes


def _replay_routes(api: PipelineApi) -> APIRouter:
    routes = APIRouter(prefix="/sinks/{sink}", tags=["replays"])

    @routes.post("/replay", status_code=ACCEPTED)
    def replay(pipeline: PipelinePath, sink: SinkPath, body: ReplayBody, request: Request) -> ReplayStatus:
        """Rebuild the sink's target from the log in a child process (`cdc replay`); 409 while one runs."""
        api.check_sink(pipeline, sink)
        wanted = ReplayRequest(
            sink=sink, start=body.start, end=body.end, tables=tuple(body.tables), dry_run=body.dry_run
        )
        return api.replays.start(wanted, actor_of(request))

    @routes.get("/replay")
    def replay_of(pipeline: PipelinePath, sink: SinkPath) -> ReplayStatus:
        """The last replay of the sink, started here or submitted to a cluster; 404 without one."""
        api.check_sink(pipeline, sink)
        last = api.replays.last(sink)
        if last is None:
            raise UnknownName(
                f"no replay of sink {sink!r} was started over the API", remedy="POST to the same path starts one"
            )
        return last

    return routes


def actor_of(request: Request) -> str:
    """The client as the audit names it."""
    return "api" if request.client is None else f"api from {request.client.host}"


def _backfill_requests() -> Any:
    return import_module("cdc.snapshot.backfill_requests")
