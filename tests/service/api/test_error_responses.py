"""Error responses: every error of the API has the same form."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from cdc.errors import (
    CatalogUnavailable,
    CdcError,
    ChildFailed,
    ConfigError,
    CutUnavailable,
    PositionNotReached,
    RequestRefused,
    SinkUnavailable,
    StateConflict,
    UnknownName,
)
from cdc.service.api.error_responses import add_error_handlers


@pytest.mark.parametrize("path", ["/api/v1/pipelines/none", "/api/v1/errors/CDC-9999", "/api/v1/none", "/none"])
def test_what_does_not_exist_is_refused_in_the_one_form_of_errors(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert set(answer.json()) == {"code", "message", "suggestion"}


def answer_of(app: FastAPI, path: str) -> httpx.Response:
    """The answer of an app, without a socket."""

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return await client.get(path)

    return asyncio.run(get())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnknownName("no sink"), 404),
        (StateConflict("it runs"), 409),
        (ConfigError("no key"), 422),
        (CatalogUnavailable("away"), 503),
        (ChildFailed("ended"), 500),
        (RequestRefused("no token"), 403),
        (CutUnavailable("another position"), 409),
        (SinkUnavailable("away"), 503),
        (PositionNotReached("too slow"), 504),
    ],
)
def test_the_kind_of_an_error_decides_the_status(error: CdcError, status: int) -> None:
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/")
    def fail() -> None:
        raise error

    answer = answer_of(app, "/")
    assert (answer.status_code, answer.json()) == (status, error.to_json())


def test_a_malformed_request_is_refused_without_its_values() -> None:
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/{number}")
    def square(number: int) -> int:
        return number * number

    answer = answer_of(app, "/hidden")
    assert (answer.status_code, answer.json()["code"]) == (422, "CDC-1000")
    assert "hidden" not in answer.text
