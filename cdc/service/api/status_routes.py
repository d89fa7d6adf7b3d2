"""Routes that show the pipeline: probes, metrics, status, event streams, and the pages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from cdc.errors import RequestLimitExceeded, UnknownName, all_error_classes
from cdc.service.api.access import has_token
from cdc.service.api.error_responses import ErrorExplanation
from cdc.service.api.prometheus_metrics import prometheus_text, reported_values
from cdc.service.api.route_context import OwnContext, Sampler
from cdc.service.api.status_sampler import StatusSampler
from cdc.service.page.document import docs_page, locked_page
from cdc.service.status import PipelineStatus, SinkStatus
from cdc.service.table_status import TableStatus

POLL_INTERVAL: Final = 0.1
"""Seconds between two checks of an event stream for a new sample; an event is delayed by at most this time."""
MAX_STREAMS: Final = 64
"""Maximum number of event streams that are open at once; each sends some KiB per second."""
POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of every response but that of `/docs`."""
_DOCS_POLICY: Final = POLICY.replace("img-src 'self'", "img-src 'self' data:")
"""Content security policy of the page `/docs`; it allows the inline icons in the style sheet of Swagger UI."""


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


process_routes = APIRouter(tags=["process"])
"""The routes for probes and Prometheus."""


@process_routes.get("/healthz")
def healthz() -> dict[str, str]:
    """Return 200 while the server process answers; no other process is checked."""
    return {"status": "ok"}


@process_routes.get("/readyz")
def readyz(sampler: Sampler) -> JSONResponse:
    """Return the state of the pipeline: with status 503 if reader or apply does not run, otherwise with 200."""
    status = sampler.status()
    return JSONResponse({"status": status.state}, 503 if status.state == "down" else 200)


@process_routes.get("/metrics")
def metrics(sampler: Sampler) -> Response:
    """Return the metrics of all processes of the pipeline in the text format of Prometheus."""
    status = sampler.full_status()
    reports = [one for one in sampler.catalog.processes.ls(sampler.name) if sampler.defined.has_process(one.process)]
    figures = reported_values(status, reports)
    return Response(prometheus_text(status, figures), media_type="text/plain; version=0.0.4; charset=utf-8")


routes = APIRouter(tags=["status"])
"""The routes that return the status of pipelines, and explain errors."""


@routes.get("/status", response_model=LiveStatus)
def status(sampler: Sampler) -> dict[str, Any]:
    """Return the whole status of this server's pipeline, with rates and lags of the last minutes."""
    return _live_status(sampler)


@routes.get("/events")
async def events(sampler: Sampler) -> Response:
    """Send the result of `GET /status` once a second, as server-sent events named `status`."""
    return _stream(sampler, "status", lambda: _live_status(sampler))


@routes.get("/pipelines")
def pipelines(sampler: Sampler) -> list[PipelineState]:
    """Return every pipeline of the catalog with its state."""
    names = sorted({sampler.name, *(pipeline.name for pipeline in sampler.catalog.pipelines.ls())})
    return [PipelineState(name, sampler.status_of(name).state) for name in names]


@routes.get("/pipelines/{name}")
def pipeline(sampler: Sampler, name: str) -> PipelineStatus:
    """Return the status of one pipeline of the catalog."""
    return _status_by_name(sampler, name)


@routes.get("/pipelines/{name}/tables")
def tables(sampler: Sampler, name: str) -> list[TableStatus]:
    """Return the status of each table of a pipeline, at the source (`sink` is empty) and in every sink."""
    return list(_status_by_name(sampler, name).tables)


@routes.get("/pipelines/{name}/sinks")
def sinks(sampler: Sampler, name: str) -> list[SinkStatus]:
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


page_routes = APIRouter(include_in_schema=False)
"""The routes of the pages."""


@page_routes.get("/", response_class=HTMLResponse)
def index(context: OwnContext, request: Request) -> HTMLResponse:
    """Return the page of the pipeline, or a page without data if the request has no valid token."""
    service = context.definition.service
    is_allowed = service.token is None or has_token(request.headers, service)
    return HTMLResponse(context.sampler.page() if is_allowed else locked_page())


@page_routes.get("/docs", response_class=HTMLResponse)
def docs() -> HTMLResponse:
    """Return the page that documents the API."""
    return HTMLResponse(docs_page(), headers={"content-security-policy": _DOCS_POLICY})


@page_routes.get("/page/events")
async def sections(sampler: Sampler) -> Response:
    """Send the sections of the page once a second, as server-sent events named `sections`."""
    return _stream(sampler, "sections", sampler.sections)


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
