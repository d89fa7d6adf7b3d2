"""The server process: binds a port, logs its URL, and serves until SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

import structlog
import uvicorn

from cdc.catalog import Catalog
from cdc.config import Definition
from cdc.errors import PortTaken
from cdc.failpoint import hit
from cdc.service.api.app import create_app
from cdc.service.api.request_limits import RequestLimits, limited
from cdc.service.defined_pipeline import forget_renamed

PORTS_TO_TRY: Final = 20
"""Number of ports that are tried after the configured port, if that port is in use."""
LAST_PORT: Final = 65535
SHUTDOWN_TIMEOUT: Final = 2
"""Seconds that open responses get to finish; event streams end within a tenth of a second."""

log = structlog.get_logger("server")


def main(definition: Definition, file: Path, *, strict_port: bool = False) -> int:
    """Serve API and page of a pipeline until SIGTERM or SIGINT; return 0.

    With `strict_port` a port in use raises PortTaken. Raises ServiceUnprotected if other machines could reach the
    service without a token.
    """
    service = definition.service
    if service.exposure is not None:
        raise service.exposure
    listener = bind(service.host, service.port, neighbours=0 if strict_port else PORTS_TO_TRY)
    with Catalog.open(definition.catalog.url) as catalog, listener:
        catalog.pipelines.put(definition.name, definition.model_dump_json(exclude_none=True))
        forget_renamed(catalog, definition)
        app = create_app(catalog, definition, definition.log.path, file=file)
        port = listener.getsockname()[1]
        if service.port not in {0, port}:
            log.warning(
                "the configured port is in use, so the server uses the next free port", asked=service.port, port=port
            )
        log.info("the server accepts requests", url=f"http://{_url_host(service.host)}:{port}")
        serve(app, listener)
    return 0


def serve(app: Callable[..., object], listener: socket.socket) -> None:
    """Serve an app on a bound socket until SIGTERM or SIGINT."""
    server = uvicorn.Server(server_config(app))

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # for signals that arrive before uvicorn handles them, and for those that it raises again after its shutdown
    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        hit("before_serve")
        server.run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def server_config(app: Callable[..., object], limits: RequestLimits | None = None) -> uvicorn.Config:
    """Return the uvicorn configuration of an app."""
    return uvicorn.Config(
        app,
        http=limited(limits or RequestLimits()),
        ws="none",
        lifespan="on",
        proxy_headers=False,  # no header may set the client's address in the audit
        server_header=False,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
    )


def bind(host: str, port: int, *, neighbours: int = PORTS_TO_TRY) -> socket.socket:
    """Return a listening socket on `port`, or on the first free one of the `neighbours` ports that follow it.

    Raises PortTaken if none of these ports is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = min(LAST_PORT, port + neighbours) if port else 0
    for candidate in range(port, last + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(128)
        except OSError:
            listener.close()
        else:
            return listener
    raise PortTaken(f"the server found no free port on {host!r} from {port} to {last}")


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
