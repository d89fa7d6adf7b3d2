"""How the API refuses: always {code, message, suggestion}, with a status that tells whose turn it is."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cdc.errors import CatalogUnavailable, CdcError, ConfigError, UnknownName

_STATUSES: Final = ((UnknownName, 404), (CatalogUnavailable, 503), (ConfigError, 422))
_SERVER_ERROR: Final = 500


def install(app: FastAPI) -> None:
    """Let every error of the app become our JSON."""
    app.add_exception_handler(CdcError, _refused)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(RequestValidationError, _malformed)


def body(code: str, message: str, suggestion: str) -> dict[str, str]:
    """The one form of an error."""
    return {"code": code, "message": message, "suggestion": suggestion}


def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CdcError)  # noqa: S101 - registered for nothing else
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), _SERVER_ERROR)
    return JSONResponse(body(error.code, error.message, error.fix), status)


def _unknown(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    message = f"{request.method} {request.url.path!r}: {str(error.detail).lower()}"
    return JSONResponse(body(UnknownName.code, message, UnknownName.remedy), error.status_code)


def _malformed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for nothing else
    places = ", ".join(repr(".".join(str(part) for part in flaw["loc"])) for flaw in error.errors())
    return JSONResponse(body(ConfigError.code, f"malformed request: {places}", UnknownName.remedy), 422)
