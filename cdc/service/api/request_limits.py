"""Limits of the server: size of a request, time for a request to arrive, and number of connections.

uvicorn has only one time-out, for connections that are idle after a response. Without the limits of this module, a
client may open connections and send nothing, or send a body without end. LimitedProtocol applies limits before the app
is called and after the app has answered. BodyLimit reads the body for the app, and limits the body's size and time.

An event stream is a response, which has no time limit as long as the client reads it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass
from typing import ClassVar, Final

import h11
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from cdc.errors import CdcError, RequestLimitExceeded, RequestRefused

_TOO_SLOW: Final = 408
_TOO_LARGE: Final = 413
_OVERLOADED: Final = 503


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one server; times are in seconds."""

    head: float = 10.0
    """Maximum time from the connection, or from the first byte of a later request, to the end of the headers."""
    body: float = 60.0
    """Maximum time from the end of the headers to the end of the body; the largest body must arrive at 70 KiB/s."""
    body_bytes: int = 4 * 2**20
    """Maximum size of a body in bytes. The largest useful body is a list of 10,000 keys, about 1 MiB."""
    unread: float = 60.0
    """Maximum time for which a client may leave its response unread; the page reads its stream every second."""
    linger: float = 2.0
    """Time for which a connection stays open if the response was sent before the whole request arrived."""
    connections: int = 256
    """Maximum number of open connections; a process may open 1024 files by default, and the log needs some of them."""


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with the default limits; `limited` returns a class with other limits."""

    limits: ClassVar[RequestLimits] = RequestLimits()
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _has_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn declares it
        """Start the timer for the request headers, or refuse the connection if too many connections are open."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            message = f"the server refuses the connection: more than {self.limits.connections} connections are open"
            self._answer(
                _OVERLOADED, RequestLimitExceeded(message, remedy="close connections, or send the request again later")
            )
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of the connection."""
        for timer in (self._head_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes; ignore them if the connection is about to close."""
        if self._linger_timer is not None or self.transport.is_closing():
            return
        self._has_begun = True
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._has_begun = False
            self._cancel_head_timer()
        elif self._head_timer is None:
            self._expect_head()

    def on_response_complete(self) -> None:
        """Wait for the next request on this connection.

        If the response was sent before the whole request had arrived, no next request can follow. The connection then
        sends nothing more, and is closed after `limits.linger` seconds.
        """
        is_early = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if is_early:
            # a connection that is closed under a client that still sends is reset, and the answer is lost
            self._unset_keepalive_if_required()
            self.transport.write_eof()
            self._linger_timer = self.loop.call_later(self.limits.linger, self.transport.abort)
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._unset_keepalive_if_required()
            self._has_begun = True
            self._expect_head()

    def pause_writing(self) -> None:
        """Start the timer that resets the connection if the client reads nothing."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.unread, self._drop)

    def resume_writing(self) -> None:
        """Stop the timer that `pause_writing` started, because the client reads again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer with an error response of the API, because the request is not valid HTTP."""
        remedy = "send HTTP/1.1 with at most 64 KiB of path and headers"
        self._answer(400, RequestRefused(msg.rstrip(".").lower(), remedy=remedy))

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head, self._end_head)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_head(self) -> None:
        if self._has_begun:
            message = f"the headers of the request took more than {self.limits.head:g} s"
            self._answer(_TOO_SLOW, RequestLimitExceeded(message))
        elif not self.transport.is_closing():
            self.transport.close()  # browsers open connections that they may need

    def _drop(self) -> None:
        """Reset the connection: after a normal close the kernel would keep the bytes that the client has not read."""
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _answer(self, status: int, error: CdcError) -> None:
        """Send an error response without calling the app, and close the connection."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.abort()
            return
        content = json.dumps(error.to_json()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(content))), ("connection", "close")]
        response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (response, h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def limited(limits: RequestLimits) -> type[LimitedProtocol]:
    """Return a LimitedProtocol class with these limits."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})


class BodyLimit:
    """Middleware that reads the body before it calls the app: 413 if the body is too large, 408 if it is too slow."""

    def __init__(self, app: ASGIApp, limits: RequestLimits | None = None) -> None:
        self._app, self._limits = app, limits or RequestLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body of an HTTP request and call the app, or answer with status 413 or 408."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._limits.body):
                body = await self._read(scope, receive)
        except RequestLimitExceeded as error:
            await JSONResponse(error.to_json(), _TOO_LARGE)(scope, receive, send)
        except TimeoutError:
            slow = RequestLimitExceeded(f"the body of the request took more than {self._limits.body:g} s")
            await JSONResponse(slow.to_json(), _TOO_SLOW)(scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the whole body; None if the client disconnected.

        Raises RequestLimitExceeded if the body is too large.
        """
        limit, body, more = self._limits.body_bytes, bytearray(), True
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise RequestLimitExceeded(f"the request body has {int(announced)} bytes: expected at most {limit}")
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > limit:
                raise RequestLimitExceeded(f"the request body is too large: expected at most {limit} bytes")
            more = message.get("more_body", False)
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that first returns the body, which was already read, and then calls `receive`."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
