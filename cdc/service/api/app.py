"""The web application of the server process: routes, status sampler, security headers and error responses.

The body of every error response is {code, message, suggestion}; the class of the error determines the HTTP status.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from cdc.catalog import Catalog
from cdc.config import Definition
from cdc.config.definition import Service
from cdc.errors import (
    CatalogUnavailable,
    CdcError,
    ConfigError,
    LogError,
    RequestLimitExceeded,
    SourceError,
    StateConflict,
    UnknownName,
    all_error_classes,
)
from cdc.service.api.access import Access, has_token
from cdc.service.api.dead_letter_routes import dead_letter_routes
from cdc.service.api.job_routes import job_routes
from cdc.service.api.log_routes import log_routes
from cdc.service.api.prometheus_metrics import prometheus_text, reported_values
from cdc.service.api.request_limits import BodyLimit
from cdc.service.api.route_context import RouteContext
from cdc.service.api.status_sampler import StatusSampler
from cdc.service.background_jobs import ReplayJobs, VerificationJobs
from cdc.service.log_sampler import utc_now
from cdc.service.page.document import docs_page, locked_page
from cdc.service.status import PipelineStatus, SinkStatus
from cdc.service.table_status import TableStatus

# for the OpenAPI description only; Access checks the token
_BEARER: Final = Security(
    HTTPBearer(
        auto_error=False,
        description="The token in the file that service.token names; required if service.token is set.",
    )
)
SAMPLE_INTERVAL: Final = 1.0
"""Seconds between two samples of the pipeline's status."""
POLL_INTERVAL: Final = 0.1
"""Seconds between two checks of an event stream for a new sample; an event is delayed by at most this time."""
MAX_STREAMS: Final = 64
"""Maximum number of event streams that are open at once; each sends some KiB per second."""
_POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_DOCS_POLICY: Final = _POLICY.replace("img-src 'self'", "img-src 'self' data:")
"""Content security policy of the page `/docs`; it allows the inline icons in the style sheet of Swagger UI."""
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


_STATUSES: Final = (
    (UnknownName, 404),
    (StateConflict, 409),
    (ConfigError, 422),
    (CatalogUnavailable, 503),
    (SourceError, 503),
    (LogError, 503),
)
"""HTTP status by error class; the first entry whose class matches the error applies."""
_SERVER_ERROR: Final = 500
_NO_JSON: Final = "json_invalid"
_SEE_OPENAPI: Final = "correct the request as GET /api/v1/openapi.json describes it"


class ErrorResponse(BaseModel):
    """Body of every error response."""

    code: str = Field(examples=["CDC-1006"], description="Error code; `cdc explain` explains it.")
    message: str
    suggestion: str = Field(description="What the operator does next.")


class ErrorExplanation(ErrorResponse):
    """Explanation of one error code, as `cdc explain` prints it."""

    reaction: str = Field(description="How a process reacts to the error: retry, halt or quarantine.")


ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorResponse, "description": "the body is not JSON"},
    401: {"model": ErrorResponse, "description": "the token is missing or wrong"},
    403: {
        "model": ErrorResponse,
        "description": "the service refuses this request, or refuses requests from this origin",
    },
    404: {"model": ErrorResponse, "description": "there is no object with that name or number"},
    409: {"model": ErrorResponse, "description": "the request conflicts with a running or finished job"},
    422: {"model": ErrorResponse, "description": "the request is invalid"},
    503: {"model": ErrorResponse, "description": "the catalog, the log or the source does not answer"},
}
"""Error responses that every path below `/api/v1` may return in addition to its own responses."""


def create_app(
    catalog: Catalog,
    definition: Definition,
    log_root: str,
    clock: Callable[[], datetime] = utc_now,
    file: Path | None = None,
) -> FastAPI:
    """Return the web application of one pipeline's server.

    `file` is the path of the definition file; without it the server cannot start replays and verifications.
    """
    sampler = StatusSampler(catalog, definition, log_root, clock, file)
    replays = ReplayJobs(catalog, definition.name, file)
    verifications = VerificationJobs(catalog, definition.name, file)

    @asynccontextmanager
    async def sampling(_: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(replays.jobs.fail_unfinished)
        await run_in_threadpool(verifications.jobs.fail_unfinished)
        await run_in_threadpool(sampler.sample)
        task = asyncio.create_task(_sample(sampler))
        try:
            yield
        finally:
            sampler.is_stopping = True
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await run_in_threadpool(replays.jobs.stop)
            await run_in_threadpool(verifications.jobs.stop)
            await run_in_threadpool(sampler.report_stopped)

    # FastAPI's own documentation page loads scripts from another site, so the page package has its own
    app = FastAPI(title="cdc", lifespan=sampling, docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json")
    app.state.sampler = sampler
    app.mount("/static", StaticFiles(directory=str(files("cdc.service.page") / "static")), name="static")
    app.include_router(_process_routes(sampler))
    described: dict[str, Any] = {"prefix": "/api/v1", "responses": ERROR_RESPONSES, "dependencies": [_BEARER]}
    app.include_router(_status_routes(sampler), **described)
    context = RouteContext(catalog, definition, replays, verifications)
    for routes in (job_routes, log_routes, dead_letter_routes):
        app.include_router(routes(context), **described)
    app.include_router(_page_routes(sampler, definition.service))
    app.add_middleware(BodyLimit)
    app.add_middleware(Access, service=definition.service)
    app.middleware("http")(_add_headers)
    add_error_handlers(app)
    return app


@dataclass(frozen=True, slots=True)
class PipelineState:
    """Name and state of one pipeline."""

    name: str
    state: str


@dataclass(frozen=True, slots=True)
class LiveStatus(PipelineStatus):
    """Status of a pipeline, with row rates and lags of the last minutes for the source and each sink."""

    rates: Mapping[str, float] = field(default_factory=dict)
    """`source` or `sink:NAME` → rows per second."""
    lags: Mapping[str, list[float]] = field(default_factory=dict)
    """`source` or `sink:NAME` → lags in seconds, oldest first."""


def _process_routes(sampler: StatusSampler) -> APIRouter:
    routes = APIRouter(tags=["process"])

    @routes.get("/healthz")
    def healthz() -> dict[str, str]:
        """Return 200 while the server process answers; no other process is checked."""
        return {"status": "ok"}

    @routes.get("/readyz")
    def readyz() -> JSONResponse:
        """Return the state of the pipeline: with status 503 if reader or apply does not run, otherwise with 200."""
        status = sampler.status()
        return JSONResponse({"status": status.state}, 503 if status.state == "down" else 200)

    @routes.get("/metrics")
    def metrics() -> Response:
        """Return the metrics of all processes of the pipeline in the text format of Prometheus."""
        status = sampler.full_status()
        reports = sampler.catalog.processes.ls(sampler.name)
        figures = reported_values(status, reports)
        return Response(prometheus_text(status, figures), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def _status_routes(sampler: StatusSampler) -> APIRouter:
    routes = APIRouter(tags=["status"])

    @routes.get("/status", response_model=LiveStatus)
    def status() -> dict[str, Any]:
        """Return the whole status of this server's pipeline, with rates and lags of the last minutes."""
        return _live_status(sampler)

    @routes.get("/events")
    async def events() -> Response:
        """Send the result of `GET /status` once a second, as server-sent events named `status`."""
        return _stream(sampler, "status", lambda: _live_status(sampler))

    @routes.get("/pipelines")
    def pipelines() -> list[PipelineState]:
        """Return every pipeline of the catalog with its state."""
        names = sorted({sampler.name, *(pipeline.name for pipeline in sampler.catalog.pipelines.ls())})
        return [PipelineState(name, sampler.status_of(name).state) for name in names]

    @routes.get("/pipelines/{name}")
    def pipeline(name: str) -> PipelineStatus:
        """Return the status of one pipeline of the catalog."""
        return _status_by_name(sampler, name)

    @routes.get("/pipelines/{name}/tables")
    def tables(name: str) -> list[TableStatus]:
        """Return the status of each table of a pipeline, at the source (`sink` is empty) and in every sink."""
        return list(_status_by_name(sampler, name).tables)

    @routes.get("/pipelines/{name}/sinks")
    def sinks(name: str) -> list[SinkStatus]:
        """Return the progress of each sink of a pipeline."""
        return list(_status_by_name(sampler, name).sinks)

    @routes.get("/errors/{code}")
    def error(code: str) -> ErrorExplanation:
        """Return what an error code means, how a process reacts to the error, and what an operator does next."""
        found = next((kind for kind in all_error_classes() if kind.code == code.upper()), None)
        if found is None:
            raise UnknownName(f"no error has the code {code!r}", remedy="run 'cdc explain' to list all codes")
        meaning = (found.__doc__ or "").strip().splitlines()[0]
        return ErrorExplanation(**found(meaning).to_json(), reaction=found.reaction.value)

    return routes


def _page_routes(sampler: StatusSampler, service: Service) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/", response_class=HTMLResponse)
    def index(request: Request) -> HTMLResponse:
        is_allowed = service.token is None or has_token(request.headers, service)
        return HTMLResponse(sampler.page() if is_allowed else locked_page())

    @routes.get("/docs", response_class=HTMLResponse)
    def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(), headers={"content-security-policy": _DOCS_POLICY})

    @routes.get("/page/events")
    async def sections() -> Response:
        return _stream(sampler, "sections", sampler.sections)

    return routes


def _status_by_name(sampler: StatusSampler, name: str) -> PipelineStatus:
    if name != sampler.name and sampler.catalog.pipelines.get(name) is None:
        raise UnknownName(f"the catalog of this server has no pipeline called {name!r}")
    return sampler.status_of(name)


def _live_status(sampler: StatusSampler) -> dict[str, Any]:
    return {**sampler.full_status().to_json(), **sampler.history.to_json()}


def _stream(sampler: StatusSampler, event: str, content: Callable[[], dict[str, Any]]) -> Response:
    if sampler.streams >= MAX_STREAMS:
        message = f"the server cannot open another event stream: {MAX_STREAMS} are open already"
        exceeded = RequestLimitExceeded(message, remedy="close event streams, or read GET /api/v1/status instead")
        return JSONResponse(exceeded.to_json(), 503)
    return StreamingResponse(event_stream(sampler, event, content), media_type="text/event-stream")


async def event_stream(sampler: StatusSampler, event: str, content: Callable[[], dict[str, Any]]) -> AsyncIterator[str]:
    """Yield one server-sent event per sample, the first at once, until the server stops."""
    seen = -1
    sampler.streams += 1
    try:
        while not sampler.is_stopping:
            if sampler.samples != seen:
                seen = sampler.samples
                fields = await run_in_threadpool(content)
                yield f"event: {event}\nid: {seen}\ndata: {json.dumps(fields, ensure_ascii=False)}\n\n"
            await asyncio.sleep(POLL_INTERVAL)
    finally:
        sampler.streams -= 1


async def _sample(sampler: StatusSampler) -> None:
    while True:
        await asyncio.sleep(SAMPLE_INTERVAL)
        await run_in_threadpool(sampler.sample)


async def _add_headers(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await answer(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def add_error_handlers(app: FastAPI) -> None:
    """Register handlers that answer every error of the app as {code, message, suggestion}."""
    app.add_exception_handler(CdcError, _known_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)


def _known_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CdcError)  # noqa: S101 - registered for nothing else
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), _SERVER_ERROR)
    return JSONResponse(error.to_json(), status)


def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    message = f"{request.method} {request.url.path!r}: {str(error.detail).lower()}"
    return JSONResponse(UnknownName(message, remedy=_SEE_OPENAPI).to_json(), error.status_code)


def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for nothing else
    invalid = error.errors()
    if any(field["type"] == _NO_JSON for field in invalid):
        return JSONResponse(ConfigError("the request body is not JSON", remedy=_SEE_OPENAPI).to_json(), 400)
    # the message does not repeat the input, which may contain row values
    problems = ", ".join(f"{'.'.join(map(str, field['loc']))!r}: {field['msg'].lower()}" for field in invalid)
    return JSONResponse(ConfigError(f"the request is malformed: {problems}", remedy=_SEE_OPENAPI).to_json(), 422)
