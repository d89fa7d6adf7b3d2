"""Routes: all routes of API and page as one FastAPI application, without the state of a server."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from starlette.staticfiles import StaticFiles

from cdc.service.api import (
    dead_letter_routes,
    delivery_routes,
    job_routes,
    log_routes,
    query_routes,
    search_routes,
    status_routes,
    view_routes,
)
from cdc.service.api.error_responses import ERROR_RESPONSES, add_error_handlers

# for the OpenAPI description only; Access checks the token
_BEARER: Final = Security(
    HTTPBearer(
        auto_error=False,
        description="The token in the file that service.token names; required if service.token is set.",
    )
)


def _api() -> FastAPI:
    # FastAPI's own documentation page loads scripts from another site, so the page package has its own
    api = FastAPI(title="cdc", docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json")
    api.mount("/static", StaticFiles(directory=str(files("cdc.service.page") / "static")), name="static")
    described: dict[str, Any] = {"prefix": "/api/v1", "responses": ERROR_RESPONSES, "dependencies": [_BEARER]}
    api.include_router(status_routes.process_routes)
    for module in (
        status_routes,
        job_routes,
        log_routes,
        dead_letter_routes,
        delivery_routes,
        search_routes,
        query_routes,
        view_routes,
    ):
        api.include_router(module.routes, **described)
    api.include_router(status_routes.page_routes)
    add_error_handlers(api)
    return api


API: Final = _api()
"""The routes, without state: FastAPI needs half a second to prepare them, so that all apps of a process share them."""
