"""Limits of a request, over real sockets."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from cdc.catalog import Catalog
from cdc.service.api.app import create_app
from cdc.service.api.request_limits import BodyLimit, RequestLimits
from cdc.service.api.status_routes import MAX_STREAMS
from tests.fixtures.waiting import until
from tests.service.pipeline import NAME, TOKEN, copy_log, definition, fill, new_catalog
from tests.service.running import answering, client_of

SHORT = RequestLimits(head=0.3, body=0.3, body_bytes=1000, linger=0.3, unread=0.3, connections=4)
BACKFILLS = f"/api/v1/pipelines/{NAME}/backfills"
HEAD = b"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\n"
DEADLINE = 20.0
"""Seconds until a socket of a test gives up; far more than any limit here."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the number of bytes in the body; at /early before reading it, at /long without end."""
    if scope["type"] == "lifespan":
        for answer in ("lifespan.startup.complete", "lifespan.shutdown.complete"):
            await receive()
            await send({"type": answer})
    elif scope["path"] == "/long":
        await StreamingResponse(iter(lambda: b"x" * 65536, b""))(scope, receive, send)
    elif scope["path"] == "/early":
        await PlainTextResponse("early", 401)(scope, receive, send)
    else:
        body = (await receive())["body"]
        await PlainTextResponse(str(len(body)))(scope, receive, send)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    early = scope.get("path") == "/early"
    await (echo if early else BodyLimit(echo, SHORT))(scope, receive, send)


@pytest.fixture(name="address")
def _address() -> Iterator[tuple[str, int]]:
    with answering(app, SHORT) as url:
        parts = urlsplit(url)
        yield str(parts.hostname), int(parts.port or 0)


@pytest.fixture(name="catalog")
def _catalog(tmp_path: Path) -> Iterator[Catalog]:
    copy_log(tmp_path)
    with new_catalog(tmp_path) as opened:
        fill(opened)
        yield opened


def answer_to(address: tuple[str, int], *parts: bytes) -> bytes:
    """Everything that the server sends until it closes the connection."""
    with closing(socket.create_connection(address, DEADLINE)) as client:
        for part in parts:
            client.sendall(part)
        return b"".join(iter(lambda: client.recv(65536), b""))


def status_of(client: httpx.Client, stream: str) -> int:
    with client.stream("GET", stream) as answer:
        return answer.status_code


def refusal_in(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_a_connection_that_sends_nothing_is_closed(address: tuple[str, int]) -> None:
    assert answer_to(address) == b""


@pytest.mark.parametrize("part", [b"G", HEAD, HEAD + b"X-Long: " + b"x" * 1000])
def test_headers_without_an_end_are_refused_in_time(address: tuple[str, int], part: bytes) -> None:
    status, refusal = refusal_in(answer_to(address, part))
    assert (status, refusal["code"]) == (408, "CDC-5017")


def test_the_next_request_of_a_connection_is_limited_as_the_first(address: tuple[str, int]) -> None:
    answer = answer_to(address, HEAD + b"Content-Length: 2\r\n\r\nab", HEAD)
    first, _, second = answer.partition(b"HTTP/1.1 408")
    assert first.endswith(b"\r\n\r\n2")
    assert b"CDC-5017" in second


@pytest.mark.parametrize("announced", [b"Content-Length: 900\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_a_body_without_an_end_is_refused_in_time(address: tuple[str, int], announced: bytes) -> None:
    status, refusal = refusal_in(answer_to(address, HEAD + announced + b"\r\n", b"5\r\nhello\r\n"))
    assert (status, refusal["code"]) == (408, "CDC-5017")


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: 1001\r\n\r\n",
        b"Content-Length: 600000000000\r\n\r\n" + b"x" * 5000,
        b"Transfer-Encoding: chunked\r\n\r\n400\r\n" + b"x" * 1024 + b"\r\n",
    ],
)
def test_a_body_that_is_too_large_is_refused_and_the_connection_ends(address: tuple[str, int], sent: bytes) -> None:
    status, refusal = refusal_in(answer_to(address, HEAD + sent))
    assert (status, refusal["code"]) == (413, "CDC-5017")
    assert "expected at most 1000" in refusal["message"]


def test_after_an_early_answer_a_client_that_still_sends_is_dropped(address: tuple[str, int]) -> None:
    early = HEAD.replace(b"/x", b"/early") + b"Content-Length: 600000000000\r\n\r\n"
    with closing(socket.create_connection(address, DEADLINE)) as client:
        client.sendall(early + b"x" * 100_000)
        answer = b""
        while not answer.endswith(b"early"):
            answer += client.recv(65536)

        def is_dropped() -> bool:
            try:
                client.sendall(b"x" * 1000)
            except ConnectionError:
                return True
            return False

        until(is_dropped, "the end of the connection", seconds=DEADLINE)


def test_a_body_at_the_limit_arrives_whole(address: tuple[str, int]) -> None:
    host, port = address
    assert httpx.post(f"http://{host}:{port}/x", content=b"x" * 1000, verify=False).text == "1000"


def test_a_client_that_does_not_read_its_answer_is_dropped(address: tuple[str, int]) -> None:
    with closing(socket.create_connection(address, DEADLINE)) as client:
        client.sendall(HEAD.replace(b"/x", b"/long") + b"Content-Length: 0\r\n\r\n")
        closed = select.poll()
        closed.register(client, 0)  # nothing but the end of the connection
        assert closed.poll(DEADLINE * 1000)


def test_one_connection_too_many_is_refused(address: tuple[str, int]) -> None:
    with ExitStack() as opened:
        for _ in range(SHORT.connections):
            client = opened.enter_context(closing(socket.create_connection(address, DEADLINE)))
            client.sendall(HEAD + b"Content-Length: 900\r\n\r\n")
        status, refusal = refusal_in(answer_to(address))
    assert (status, refusal["code"]) == (503, "CDC-5017")


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET /" + b"x" * 70_000, HEAD + b"bad header\r\n\r\n"]
)
def test_what_is_no_http_is_refused_in_the_one_form_of_errors(address: tuple[str, int], sent: bytes) -> None:
    status, refusal = refusal_in(answer_to(address, sent))
    assert (status, refusal["code"]) == (400, "CDC-5013")


def test_the_api_takes_a_list_of_ten_thousand_keys_and_refuses_600_mib(catalog: Catalog, tmp_path: Path) -> None:
    with answering(create_app(catalog, definition(tmp_path), "log")) as url, client_of(url) as client:
        keys = [{"id": f"{n:0>90}"} for n in range(10_000)]
        answer = client.post(BACKFILLS, json={"tables": ["shop.orders"], "keys": keys})
        assert answer.status_code in {202, 422}
        huge = {"content-type": "application/json", "content-length": str(600 * 2**20)}
        answer = client.post(BACKFILLS, headers=huge, content=(b" " * 65536 for _ in range(16 * 600)))
        assert (answer.status_code, answer.json()["code"]) == (413, "CDC-5017")
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_a_huge_body_without_the_token_is_not_read(catalog: Catalog, tmp_path: Path) -> None:
    guarded = definition(tmp_path, token={"env": "SHOP_TOKEN"})
    with answering(create_app(catalog, guarded, "log")) as url, client_of(url) as client:
        answer = client.post(BACKFILLS, content=(b" " * 65536 for _ in range(16 * 600)))
        assert answer.status_code == 401
        assert client.get("/api/v1/status", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_event_streams_are_limited_and_a_closed_one_makes_room(catalog: Catalog, tmp_path: Path) -> None:
    served = create_app(catalog, definition(tmp_path), "log")
    with answering(served) as url, client_of(url, timeout=30) as client:
        place = urlsplit(url)
        with ExitStack() as opened:
            for _ in range(MAX_STREAMS):
                stream = opened.enter_context(closing(socket.create_connection((place.hostname, place.port), DEADLINE)))
                stream.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            until(lambda: served.state.sampler.streams == MAX_STREAMS, "all streams to begin")
            refused = client.get("/page/events")
            assert (refused.status_code, refused.json()["code"]) == (503, "CDC-5017")
        until(lambda: status_of(client, "/page/events") == 200, "room for a stream")
