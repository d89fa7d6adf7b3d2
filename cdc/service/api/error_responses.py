"""How the API refuses: always {code, message, suggestion}, with a status that tells whose turn it is."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from cdc.errors import CatalogUnavailable, CdcError, ConfigError, LogError, SourceError, StateConflict, UnknownName

_STATUSES: Final = (
    (UnknownName, 404),
    (StateConflict, 409),
    (ConfigError, 422),
    (CatalogUnavailable, 503),
    (SourceError, 503),
    (LogError, 503),
)
"""The first that fits: nobody by that name, not now, wrong in itself, or something behind us does not answer."""
_SERVER_ERROR: Final = 500
_NO_JSON: Final = "json_invalid"
_SEE_OPENAPI: Final = "GET /api/v1/openapi.json describes every request"


def install(app: FastAPI) -> None:
    """Let every error of the app become our JSON."""
    app.add_exception_handler(CdcError, _known_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)


class ErrorResponse(BaseModel):
    """The one form of an error."""

    code: str = Field(examples=["CDC-1006"], description="As `cdc explain` has it.")
    message: str
    suggestion: str = Field(description="What to do next.")


class ErrorExplanation(ErrorResponse):
    """What `cdc explain` says of a code."""

    reaction: str = Field(description="What the loop that meets it does: retry, halt or quarantine.")


RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorResponse, "description": "the body is no JSON"},
    401: {"model": ErrorResponse, "description": "no token, or another one"},
    403: {"model": ErrorResponse, "description": "the service takes this from nobody, or not from there"},
    404: {"model": ErrorResponse, "description": "nothing has that name or number"},
    409: {"model": ErrorResponse, "description": "it does not go with what is on its way, or has ended"},
    422: {"model": ErrorResponse, "description": "it cannot be done"},
    503: {"model": ErrorResponse, "description": "catalog, log or source do not answer"},
}
"""Answers that every path may give beside its own."""


def _known_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CdcError)  # noqa: S101 - registered for nothing else
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), _SERVER_ERROR)
    return JSONResponse(error.to_json(), status)


def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    message = f"{request.method} {request.url.path!r}: {str(error.detail).lower()}"
    return JSONResponse(UnknownName(message).to_json(), error.status_code)


def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for nothing else
    flaws = error.errors()
    if any(flaw["type"] == _NO_JSON for flaw in flaws):
        return JSONResponse(ConfigError("the body is no JSON", remedy=_SEE_OPENAPI).to_json(), 400)
    # what was sent stays unsaid: it may hold values
    places = ", ".join(f"{'.'.join(map(str, flaw['loc']))!r}: {flaw['msg'].lower()}" for flaw in flaws)
    return JSONResponse(ConfigError(f"malformed request: {places}", remedy=_SEE_OPENAPI).to_json(), 422)
