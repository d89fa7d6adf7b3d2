"""The web application of the server process: the API, with the state of the pipeline that the server serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request, Response, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPBearer
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from cdc.catalog import Catalog
from cdc.config import Definition
from cdc.service.api import dead_letter_routes, job_routes, log_routes, status_routes
from cdc.service.api.access import Access
from cdc.service.api.error_responses import ERROR_RESPONSES, add_error_handlers
from cdc.service.api.request_limits import BodyLimit
from cdc.service.api.route_context import RouteContext
from cdc.service.api.status_sampler import SAMPLE_INTERVAL, StatusSampler
from cdc.service.background_jobs import ReplayJobs, VerificationJobs
from cdc.service.log_sampler import utc_now

# for the OpenAPI description only; Access checks the token
_BEARER: Final = Security(
    HTTPBearer(
        auto_error=False,
        description="The token in the file that service.token names; required if service.token is set.",
    )
)
_HEADERS: Final = {
    "content-security-policy": status_routes.POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def create_app(
    catalog: Catalog,
    definition: Definition,
    log_root: str,
    clock: Callable[[], datetime] = utc_now,
    file: Path | None = None,
) -> Starlette:
    """Return the web application of one pipeline's server: `API`, with the pipeline that its routes show and control.

    `file` is the path of the definition file; without it the server cannot start replays and verifications.
    """
    sampler = StatusSampler(catalog, definition, log_root, clock, file)
    replays = ReplayJobs(catalog, definition.name, file)
    verifications = VerificationJobs(catalog, definition.name, file)

    @asynccontextmanager
    async def sampling(_: Starlette) -> AsyncIterator[dict[str, RouteContext]]:
        await run_in_threadpool(replays.jobs.fail_unfinished)
        await run_in_threadpool(verifications.jobs.fail_unfinished)
        await run_in_threadpool(sampler.sample)
        task = asyncio.create_task(_sample(sampler))
        try:
            yield {"context": RouteContext(sampler, catalog, definition, replays, verifications)}
        finally:
            sampler.is_stopping = True
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await run_in_threadpool(replays.jobs.stop)
            await run_in_threadpool(verifications.jobs.stop)
            await run_in_threadpool(sampler.report_stopped)

    middleware = [
        Middleware(BaseHTTPMiddleware, dispatch=_add_headers),
        Middleware(Access, service=definition.service),
        Middleware(BodyLimit),
    ]
    app = Starlette(routes=[Mount("/", API)], middleware=middleware, lifespan=sampling)
    app.state.sampler = sampler
    add_error_handlers(app)  # for paths that no route can have, such as one with a line break
    return app


def _api() -> FastAPI:
    # FastAPI's own documentation page loads scripts from another site, so the page package has its own
    api = FastAPI(title="cdc", docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json")
    api.mount("/static", StaticFiles(directory=str(files("cdc.service.page") / "static")), name="static")
    described: dict[str, Any] = {"prefix": "/api/v1", "responses": ERROR_RESPONSES, "dependencies": [_BEARER]}
    api.include_router(status_routes.process_routes)
    for module in (status_routes, job_routes, log_routes, dead_letter_routes):
        api.include_router(module.routes, **described)
    api.include_router(status_routes.page_routes)
    add_error_handlers(api)
    return api


API: Final = _api()
"""The routes, without state: FastAPI needs half a second to prepare them, so that all apps of a process share them."""


async def _sample(sampler: StatusSampler) -> None:
    while True:
        await asyncio.sleep(SAMPLE_INTERVAL)
        if sampler.is_due(time.monotonic()):
            await run_in_threadpool(sampler.sample)


async def _add_headers(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await answer(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response
