"""Route context: the path parameters, body classes, and checks of names that the routes of the API share.

The routes are functions at the top of their modules, and they are the same for every pipeline. A route that has a
parameter of type `Context`, `OwnContext`, `Sampler` or `Actor` gets the object of the server that answers the request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Final

from anyio import CapacityLimiter
from fastapi import Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from cdc.catalog import Catalog
from cdc.config import Definition
from cdc.errors import UnknownName
from cdc.service.api.status_sampler import StatusSampler
from cdc.service.background_jobs import ReplayJobs, VerificationJobs
from cdc.service.running_query import QueryProcesses

ACCEPTED: Final = 202
"""HTTP status of an accepted request, which the reader, the apply process or a child process carries out later."""
MAX_SEARCHES: Final = 8
"""Maximum number of searches that run at once; others wait for their turn."""
MAX_QUERIES: Final = 2
"""Maximum number of queries that run at once; others wait for their turn."""

Text = Annotated[str, Field(min_length=1, max_length=10_000)]
PipelinePath = Annotated[str, Path(description="Name of the pipeline in the definition.")]
TablePath = Annotated[str, Path(description="Table as `schema.table`, not a glob.")]
SinkPath = Annotated[str, Path(description="Name of the sink in the definition.")]
JobPath = Annotated[int, Path(description="Number of the job.", ge=0, lt=2**63)]


class RequestBody(BaseModel):
    """Base class of every request body; a body with unknown fields is refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class EmptyBody(RequestBody):
    """An empty request body: `{}`."""


@dataclass(frozen=True, slots=True)
class RouteContext:
    """The pipeline that the server serves: its status, catalog, definition and background jobs."""

    sampler: StatusSampler
    catalog: Catalog
    definition: Definition
    replays: ReplayJobs
    verifications: VerificationJobs
    searches: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MAX_SEARCHES))
    """Limit of the threads that search."""
    queries: QueryProcesses = field(default_factory=QueryProcesses)
    queries_at_once: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MAX_QUERIES))
    """Limit of the processes that query."""

    @property
    def name(self) -> str:
        """Name of the pipeline."""
        return self.definition.name

    def check_pipeline(self, pipeline: str) -> None:
        """Raise UnknownName if this server does not serve the pipeline."""
        if pipeline != self.name:
            raise UnknownName(
                f"this server serves the pipeline {self.name!r}, not {pipeline!r}",
                remedy="send the request to the server of that pipeline",
            )

    def check_sink(self, sink: str) -> None:
        """Raise UnknownName if the definition has no such sink."""
        names = [known.name for known in self.definition.sinks]
        if sink not in names:
            listed = ", ".join(map(repr, names)) or "none"
            raise UnknownName(f"the pipeline has no sink called {sink!r}", remedy=f"choose one of the sinks: {listed}")

    def check_table(self, table: str) -> None:
        """Raise UnknownName if the log has no such table."""
        if table not in import_module("cdc.service.log_contents").tables_by_topic(self.definition.log.root):
            raise UnknownName(
                f"the log has no table called {table!r}",
                remedy=f"choose a table that GET /api/v1/pipelines/{self.name}/tables returns",
            )


async def own_context(request: Request) -> RouteContext:
    """Return the context of the server that answers the request."""
    context: RouteContext = request.state.context
    return context


OwnContext = Annotated[RouteContext, Depends(own_context)]
"""The context of the server, whatever the path of the request."""


async def sampler_of(context: OwnContext) -> StatusSampler:
    """Return the status sampler of the server that answers the request."""
    return context.sampler


async def context_of(context: OwnContext, pipeline: PipelinePath) -> RouteContext:
    """Return the context of the server that answers; raises UnknownName if it does not serve the pipeline."""
    context.check_pipeline(pipeline)
    return context


async def actor_of(request: Request) -> str:
    """Return the name to write to the audit log for the client of a request: `api from ADDRESS`."""
    return "api" if request.client is None else f"api from {request.client.host}"


Sampler = Annotated[StatusSampler, Depends(sampler_of)]
Context = Annotated[RouteContext, Depends(context_of)]
"""The context of the server, for a route below `/pipelines/{pipeline}`; another pipeline than its own is refused."""
Actor = Annotated[str, Depends(actor_of)]
