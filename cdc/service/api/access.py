"""Access: who may ask the API and the page for something, and who may change something.

With a token in the definition every request has to carry it, but for the three paths that probes and Prometheus read
and the files that hold nothing of a pipeline. Without one, reading is free to whoever reaches the port, and changing
is for this machine: the service listens on a loopback address, the Host header is one (a page of another site may let
its own name point here), no other site is the Origin, and the body is JSON (which no form of another site can send).
"""

from __future__ import annotations

import hmac
from collections.abc import MutableMapping
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cdc.config.definition import Service
from cdc.errors import CdcError, RequestRefused, Unauthorized

READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_OPEN: Final = ("/healthz", "/readyz", "/metrics")
_SHELL: Final = "/static/"
"""The page's own files: the same for every pipeline."""
_SCHEME: Final = "bearer"


class Access:
    """Answers what may not be asked; everything else goes on to the app."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, by ASGI."""
        error = refusal(scope, self._service) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        status = 401 if isinstance(error, Unauthorized) else 403
        headers = {"www-authenticate": "Bearer"} if status == 401 else None  # noqa: PLR2004 - HTTP's number
        await JSONResponse(error.to_json(), status, headers)(scope, receive, send)


def refusal(scope: MutableMapping[str, Any], service: Service) -> CdcError | None:
    """Why the request is not answered, None if it is."""
    headers = Headers(scope=scope)
    if is_loopback(service.host) and not is_loopback(_host_of(headers.get("host", ""))):
        return RequestRefused(f"the Host header {headers.get('host', '')!r} does not name this machine")
    token = service.current_token()
    if token is not None:
        return _without_token(scope["path"], headers, token)
    return None if scope["method"] in READING else _from_elsewhere(headers, service)


def may_change(service: Service) -> bool:
    """Whether there is anybody who may change something over this service."""
    return service.token is not None or is_loopback(service.host)


def has_token(headers: Headers, token: str) -> bool:
    """Whether the request carries it; takes the same time whatever it carries."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return scheme.lower() == _SCHEME and hmac.compare_digest(given.strip().encode(), token.encode())


def is_loopback(host: str) -> bool:
    """Whether the name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _without_token(path: str, headers: Headers, token: str) -> CdcError | None:
    # the page itself is sent empty to who has none: it asks a person for it
    if path in _OPEN or path == "/" or path.startswith(_SHELL) or has_token(headers, token):
        return None
    carried = "another token" if "authorization" in headers else "no token"
    return Unauthorized(f"{path!r} wants the token of service.token, the request has {carried}")


def _from_elsewhere(headers: Headers, service: Service) -> CdcError | None:
    if not is_loopback(service.host):
        return RequestRefused(
            f"nothing can be changed over {service.host!r} without a token",
            remedy="set service.token in the definition, or let service.host be 127.0.0.1",
        )
    if (origin := headers.get("origin")) is not None and urlsplit(origin).netloc != headers.get("host"):
        return RequestRefused(f"the Origin {origin!r} is another site")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        return RequestRefused(
            f"expected a body of application/json, got {kind!r}",
            remedy="send 'Content-Type: application/json', with {} where there is nothing to say",
        )
    return None


def _host_of(header: str) -> str:
    """The name or address without port and brackets; empty for what is no host."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
