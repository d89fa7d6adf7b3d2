"""Routes that search the rows of a table, as `cdc search` does.

Other routes return no values of rows except keys. So a search needs `service.token`, also on a loopback address: every
account of the machine can connect to it.

A search that waits for a position occupies no thread between its attempts. Attempts run in threads of their own, so
that slow search servers delay neither probes nor the page.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Final

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from cdc.config import Definition
from cdc.config.units import Seconds
from cdc.errors import RequestRefused
from cdc.service.api.error_responses import ErrorResponse
from cdc.service.api.route_context import Context, RequestBody, RouteContext, Text

MAX_ROWS: Final = 1_000
"""Maximum number of rows of one page."""
LONGEST_WAIT: Final = 60.0
"""Maximum seconds for which a request waits for a position."""
POSITION_HEADER: Final = "CDC-Position"
"""Header with the position of the rows of an answer."""
_NOT_MODIFIED: Final = 304


class SearchQuery(RequestBody):
    """Query parameters of a search; unknown ones are refused."""

    table: Text
    """Table as `schema.table`, or only its name if one schema has it."""
    words: Text
    """Words that a row must contain; `column:word` searches only one column."""
    limit: Annotated[int, Field(ge=1, le=MAX_ROWS)] = 10
    """Maximum number of rows to return."""
    after: Annotated[str, Field(max_length=60_000)] | None = None
    """Token of the next page, from `next` of the page before; valid until the position of the table changes."""
    min_position: Annotated[str, Field(max_length=40)] | None = None
    """Wait until the table has every change up to this position, as 16/B374D848 or 2:16/B374D848. Without an epoch, it
    is an LSN of the sink's present epoch."""
    timeout: Annotated[Seconds, Field(le=LONGEST_WAIT)] = 10.0
    """Maximum time to wait for `min_position`, as 500ms or 10s; at most 60s."""
    sink: Text | None = None
    """Name of a search sink; by default the first search sink that has the table."""


@dataclass(frozen=True, slots=True)
class RowFound:
    """One row that a search found."""

    key: list[str | None]
    """Values of the key columns as Postgres text."""
    position: str
    """Position of the change that wrote the row."""
    score: float
    row: dict[str, str | int | float | bool | list[Any] | None]
    """Column → value, as a query of a Delta table returns it: integers and floats are numbers; numerics, NaN,
    infinities, times and bytes are text; arrays are lists. A masked column is text. Null is SQL NULL."""


@dataclass(frozen=True, slots=True)
class RowsFound:
    """One page of the rows that a search found, best match first."""

    topic: str
    position: str
    """Position of the table: the rows have every change up to it."""
    rows: list[RowFound]
    next: str | None
    """Token for `after` of the next page; null if there are no more rows."""


routes = APIRouter(prefix="/pipelines/{pipeline}", tags=["search"])
"""The routes that search."""
_HEADERS: Final = {
    POSITION_HEADER: {"description": "Position of the table.", "schema": {"type": "string"}},
    "ETag": {"description": "Changes with the body.", "schema": {"type": "string"}},
}


@routes.get(
    "/search",
    response_model=RowsFound,
    responses={
        200: {"headers": _HEADERS},
        304: {"description": "the body is as `If-None-Match` says"},
        409: {"model": ErrorResponse, "description": "the table has another position than the page token"},
        504: {"model": ErrorResponse, "description": "the table did not reach `min_position` in time"},
    },
)
async def search(context: Context, request: Request, query: Annotated[SearchQuery, Query()]) -> Response:
    """Return the rows of a table that contain all words, best match first (`cdc search`); needs `service.token`."""
    require_token(context, "search")
    found = await _search(context, query)
    body = json.dumps(found, ensure_ascii=False).encode()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {POSITION_HEADER: found["position"], "ETag": tag}
    if tag in [known.strip().removeprefix("W/") for known in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=_NOT_MODIFIED, headers=headers)
    return Response(body, headers=headers, media_type="application/json")


async def _search(context: RouteContext, query: SearchQuery) -> dict[str, Any]:
    """Search, and return the answer as JSON values; raises the errors of TableSearch."""
    with await to_thread.run_sync(_open_search, context.definition, query) as pending:
        while True:
            found = await to_thread.run_sync(pending.attempt, limiter=context.searches)
            if found is not None:
                answer: dict[str, Any] = found.to_json()
                return answer
            await asyncio.sleep(pending.pause)


def _open_search(definition: Definition, query: SearchQuery) -> Any:
    module = import_module("cdc.targets.search_query")  # with the first search, because it imports the engine
    return module.TableSearch(definition, module.SearchRequest(**query.model_dump()))


def require_token(context: RouteContext, what: str) -> None:
    """Raise RequestRefused if the API returns data without a token; `what` is the command that does the same."""
    if context.definition.service.token is None:
        raise RequestRefused(
            f"the answer to a {what} contains rows, so the server answers it only if service.token is set",
            remedy=f"set service.token in the definition, or run 'cdc {what}'",
        )
