"""Error responses: how the API answers every error, as {code, message, suggestion}.

The class of the error determines the HTTP status.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from cdc.errors import (
    CatalogUnavailable,
    CdcError,
    ConfigError,
    CutUnavailable,
    LogError,
    PositionNotReached,
    QueryFailed,
    QueryNotReadOnly,
    QueryStopped,
    RequestRefused,
    SinkError,
    SourceError,
    StateConflict,
    UnknownName,
)

_STATUSES: Final = (
    (UnknownName, 404),
    (RequestRefused, 403),
    (StateConflict, 409),
    (CutUnavailable, 409),
    (ConfigError, 422),
    (QueryNotReadOnly, 422),
    (QueryFailed, 422),
    (QueryStopped, 422),
    (CatalogUnavailable, 503),
    (SourceError, 503),
    (LogError, 503),
    (SinkError, 503),
    (PositionNotReached, 504),
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
    503: {"model": ErrorResponse, "description": "the catalog, the log, the source or a sink does not answer"},
}
"""Error responses that every path below `/api/v1` may return in addition to its own responses."""


def add_error_handlers(app: Starlette) -> None:
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
