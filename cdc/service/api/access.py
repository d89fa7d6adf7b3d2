"""Access control of API and page: which requests are answered, and which requests may change something.

If the definition has a token, every request must contain it. Exceptions are the paths of probes and Prometheus, the two
pages without data, and their static files. The token's file is read for every request and for every event of a stream.
So the removal or change of a token ends the event streams that were opened with the token.

Without a token only this machine can use the service. The service then must listen on a loopback address; with another
address the server does not start (`ServiceUnprotected`). The Host header must name a loopback address, because another
site may resolve its own host name to this address. A request for a change must not have the Origin of another site. The
body of such a request must be JSON, which no HTML form of another site can send.
"""

from __future__ import annotations

import hmac
from collections.abc import MutableMapping
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cdc.config.definition import Service, is_loopback
from cdc.errors import CdcError, RequestRefused, Unauthorized

READ_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_PUBLIC_PATHS: Final = ("/healthz", "/readyz", "/metrics", "/", "/docs")
"""Paths that need no token: probes, Prometheus, and the two pages, which contain no data without the token."""
_STATIC_PREFIX: Final = "/static/"
"""Path prefix of the static files of the pages, which are the same for every pipeline."""
_SCHEME: Final = "bearer"


class Access:
    """Middleware that refuses unauthorized requests and passes all others to the app."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an allowed request to the app, or answer a refused request with status 401 or 403."""
        error = refusal(scope, self._service) if scope["type"] == "http" else None
        if error is None:
            is_guarded = scope["type"] == "http" and self._service.token is not None and not _is_public(scope["path"])
            await self._app(scope, receive, self._recheck(scope, send) if is_guarded else send)
            return
        status = 401 if isinstance(error, Unauthorized) else 403
        headers = {"www-authenticate": "Bearer"} if status == 401 else None  # noqa: PLR2004 - HTTP's number
        await JSONResponse(error.to_json(), status, headers)(scope, receive, send)

    def _recheck(self, scope: Scope, send: Send) -> Send:
        """Return a send function that ends an event stream once the token of its request is no longer valid."""
        headers, has_ended = Headers(scope=scope), False

        async def checked(message: Message) -> None:
            nonlocal has_ended
            if has_ended:
                return
            if message.get("more_body", False) and not has_token(headers, self._service):
                has_ended = True
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        return checked


def refusal(scope: MutableMapping[str, Any], service: Service) -> CdcError | None:
    """Return the error that refuses a request; None if the request is allowed."""
    headers = Headers(scope=scope)
    if service.is_local and not is_loopback(_host_of(headers.get("host", ""))):
        return RequestRefused(f"the Host header {headers.get('host', '')!r} does not name this machine")
    if service.token is not None:
        return _without_token(scope["path"], headers, service)
    return None if scope["method"] in READ_METHODS else _refuse_cross_site(headers, service)


def may_change(service: Service) -> bool:
    """Return True if the service accepts requests that change something."""
    return service.token is not None or service.is_local


def has_token(headers: Headers, service: Service) -> bool:
    """Return True if these request headers contain the service's current token; the comparison takes constant time."""
    token = service.current_token()
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return (
        token is not None and scheme.lower() == _SCHEME and hmac.compare_digest(given.strip().encode(), token.encode())
    )


def _is_public(path: str) -> bool:
    return path in _PUBLIC_PATHS or path.startswith(_STATIC_PREFIX)


def _without_token(path: str, headers: Headers, service: Service) -> CdcError | None:
    if _is_public(path) or has_token(headers, service):
        return None
    if service.current_token() is None:
        return Unauthorized(
            f"{path!r} needs the token of service.token, but the token's file contains no valid token",
            remedy="write the token to the file that service.token names: at least 16 characters, mode 0600",
        )
    problem = "a wrong token" if "authorization" in headers else "no token"
    return Unauthorized(f"{path!r} needs the token of service.token, but the request has {problem}")


def _refuse_cross_site(headers: Headers, service: Service) -> CdcError | None:
    if not service.is_local:
        return RequestRefused(
            f"the service on {service.host!r} refuses requests that change something, because service.token is not set",
            remedy="set service.token in the definition, or set service.host to 127.0.0.1",
        )
    if (origin := headers.get("origin")) is not None and urlsplit(origin).netloc != headers.get("host"):
        return RequestRefused(f"the request comes from another site: Origin {origin!r}")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        return RequestRefused(
            f"the request body has the wrong type: expected application/json, got {kind!r}",
            remedy="send 'Content-Type: application/json', with {} as an empty body",
        )
    return None


def _host_of(header: str) -> str:
    """Return the host of a Host header without port and brackets; "" if the header is malformed."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
