"""A server answering on a real socket, in a thread of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from threading import Thread

import httpx
import uvicorn

from cdc.catalog import Catalog
from cdc.config import Definition
from cdc.service.api.app import create_app
from cdc.service.api.request_limits import RequestLimits
from cdc.service.api.server_process import bind, server_config


class Clock:
    """A clock that a test moves forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.ahead)


@contextmanager
def answering(app: Callable[..., object], limits: RequestLimits | None = None) -> Iterator[str]:
    """The URL of the app; the socket listens before the server runs, so a first request waits and nothing sleeps."""
    with bind("127.0.0.1", 0) as listener:
        server = uvicorn.Server(server_config(app, limits))
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def client_of(url: str, timeout: float = 5.0) -> httpx.Client:
    """A client of a server without TLS: to load the certificates of the world costs more than most tests."""
    return httpx.Client(base_url=url, timeout=timeout, verify=False)


@contextmanager
def serving(definition: Definition) -> Iterator[httpx.Client]:
    """A client of the API and the page of a definition."""
    with (
        Catalog.open(definition.catalog.url) as catalog,
        answering(create_app(catalog, definition, definition.log.path)) as url,
        client_of(url) as client,
    ):
        yield client
