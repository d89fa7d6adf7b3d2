"""The web application of the server process: the API, with the state of the pipeline that the server serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Final

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Mount

from cdc.catalog import Catalog
from cdc.config import Definition
from cdc.service.api.access import Access
from cdc.service.api.error_responses import add_error_handlers
from cdc.service.api.request_limits import BodyLimit
from cdc.service.api.route_context import RouteContext
from cdc.service.api.routes import API
from cdc.service.api.status_routes import POLICY
from cdc.service.api.status_sampler import SAMPLE_INTERVAL, StatusSampler
from cdc.service.background_jobs import ReplayJobs, VerificationJobs
from cdc.service.log_sampler import utc_now
from cdc.service.verification_runner import VerificationRunner

_HEADERS: Final = {
    "content-security-policy": POLICY,
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
    runner = VerificationRunner(catalog, definition, file, lambda: sampler.load)

    @asynccontextmanager
    async def sampling(_: Starlette) -> AsyncIterator[dict[str, RouteContext]]:
        await run_in_threadpool(replays.jobs.fail_unfinished)
        await run_in_threadpool(verifications.jobs.fail_unfinished)
        await run_in_threadpool(sampler.sample)
        task = asyncio.create_task(_sample(sampler))
        runner.start()
        context = RouteContext(sampler, catalog, definition, replays, verifications)
        try:
            yield {"context": context}
        finally:
            sampler.is_stopping = True
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await run_in_threadpool(context.queries.stop)
            await run_in_threadpool(runner.stop)
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
