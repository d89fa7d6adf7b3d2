"""Error responses of the API: always {code, message, suggestion}, with an HTTP status by kind of error."""

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
"""HTTP status by error class; the first match counts."""
_SERVER_ERROR: Final = 500
_NO_JSON: Final = "json_invalid"
_SEE_OPENAPI: Final = "GET /api/v1/openapi.json describes every request"


def install(app: FastAPI) -> None:
    """Register handlers so that every error of the app is answered in this form."""
    app.add_exception_handler(CdcError, _known_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)


class ErrorResponse(BaseModel):
    """The form of every error."""

    code: str = Field(examples=["CDC-1006"], description="Error code; `cdc explain` explains it.")
    message: str
    suggestion: str = Field(description="Next step.")


class ErrorExplanation(ErrorResponse):
    """What `cdc explain` prints about a code."""

    reaction: str = Field(description="How a process reacts: retry, halt or quarantine.")


RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorResponse, "description": "the body is not JSON"},
    401: {"model": ErrorResponse, "description": "the token is missing or wrong"},
    403: {"model": ErrorResponse, "description": "the service does not allow this request, or not from its origin"},
    404: {"model": ErrorResponse, "description": "there is no object with that name or number"},
    409: {"model": ErrorResponse, "description": "the request conflicts with a running or finished job"},
    422: {"model": ErrorResponse, "description": "the request is invalid"},
    503: {"model": ErrorResponse, "description": "the catalog, the log or the source does not answer"},
}
"""Responses that every path may give in addition to its own."""


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
    invalid = error.errors()
    if any(field["type"] == _NO_JSON for field in invalid):
        return JSONResponse(ConfigError("the request body is not JSON", remedy=_SEE_OPENAPI).to_json(), 400)
    # the message does not repeat the input, which may contain row values
    problems = ", ".join(f"{'.'.join(map(str, field['loc']))!r}: {field['msg'].lower()}" for field in invalid)
    return JSONResponse(ConfigError(f"malformed request: {problems}", remedy=_SEE_OPENAPI).to_json(), 422)
