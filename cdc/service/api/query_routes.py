"""The route that runs a SELECT statement on the tables of a Delta sink, as `cdc query` does.

Other routes return no values of rows except keys. So a query needs `service.token`, also on a loopback address, like a
search. Each query runs in a process of its own, with limits of time, memory and size.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

from anyio import CancelScope, to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from cdc.config.units import Seconds
from cdc.errors import RequestLimitExceeded
from cdc.service.api.error_responses import ErrorResponse
from cdc.service.api.route_context import Context, RequestBody, RouteContext, Text
from cdc.service.api.search_routes import LONGEST_WAIT, MAX_ROWS, require_token

_POLL = 0.01
"""Seconds between two checks whether a query has ended."""


class QueryBody(RequestBody):
    """Body of a query.

    To read a long result in pages, send the same ORDER BY with the next OFFSET, and the position of the first answer's
    cut as `at`.
    """

    sql: Text
    """One SELECT statement; name a table `"schema.table"`, or `table` if only one schema has it."""
    at: Text = "published"
    """Read the tables at `published` (the newest published cut), `latest`, a position, or an ISO 8601 time."""
    sink: Text | None = None
    """Name of a Delta sink; by default the first one."""
    limit: Annotated[int, Field(ge=1, le=MAX_ROWS)] = MAX_ROWS
    """Maximum number of rows to return."""
    min_position: Annotated[str, Field(max_length=40)] | None = None
    """Wait until the published cut has every change up to this position, as 16/B374D848 or 2:16/B374D848. Without an
    epoch, it is an LSN of the sink's present epoch."""
    timeout: Annotated[Seconds, Field(le=LONGEST_WAIT)] = 10.0
    """Maximum time to wait for `min_position`, as 500ms or 10s; at most 60s."""


@dataclass(frozen=True, slots=True)
class CutOfRows:
    """The published cut that rows were read from."""

    position: str
    committed_at: str | None
    apart: dict[str, str]
    """Table → its state, for each table that is not part of the cut."""


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """The rows that a query selected."""

    columns: list[str]
    rows: list[list[str | int | float | bool | list[Any] | dict[str, Any] | None]]
    """Integers and floats are numbers; decimals, NaN, infinities, times and bytes are text; arrays are lists."""
    more: bool
    """True if further rows were left out because of `limit`."""
    cut: CutOfRows | None
    """Null if the query read each table at its newest version."""


routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["query"])
"""The route that queries."""


@routes.post(
    "/query",
    response_model=SelectedRows,
    responses={
        409: {"model": ErrorResponse, "description": "there is no cut at `at`"},
        422: {
            "model": ErrorResponse,
            "description": "the statement is wrong or not a query, or it needs too much time or memory",
        },
        504: {"model": ErrorResponse, "description": "the published cut did not reach `min_position` in time"},
    },
)
async def query(context: Context, request: Request, body: QueryBody) -> JSONResponse:
    """Run a SELECT statement on the tables of a Delta sink (`cdc query`); needs `service.token`.

    A query runs for at most 30 s, with at most 1 GiB of memory.
    """
    require_token(context, "query")
    async with context.queries_at_once:
        return JSONResponse(await _run(context, request, body))


async def _run(context: RouteContext, request: Request, body: QueryBody) -> dict[str, Any]:
    """Return the answer of the query process; end the process if the client disconnects."""
    module = await to_thread.run_sync(import_module, "cdc.targets.table_query")  # with the first query: takes a second
    sink = module.queried_sink(context.definition, body.sink)
    wanted = module.QueryRequest(**body.model_dump(exclude={"sink"}))
    running = await to_thread.run_sync(context.queries.start, sink, wanted)
    try:
        while (found := running.answer()) is None:
            if await request.is_disconnected():
                raise RequestLimitExceeded("the client closed the connection before the query ended")
            await asyncio.sleep(_POLL)
        answer: dict[str, Any] = found
        return answer
    finally:
        with CancelScope(shield=True):
            await to_thread.run_sync(running.close)
