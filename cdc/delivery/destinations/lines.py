"""Destinations that take events as lines of JSON: standard output, and a TCP connection with backpressure."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Sequence
from typing import BinaryIO, ClassVar, Final

from cdc.config.destinations import SocketDelivery, StdoutDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, Promise
from cdc.delivery.destinations.event_json import line_encoder
from cdc.errors import DestinationUnavailable

TIMEOUT: Final = 30.0
"""Seconds for which a receiver may take no bytes, or not answer, before the connection counts as broken."""


class StdoutDestination:
    """Prints events. A reader that is slow, such as a pipe, slows the delivery down; one that ends, ends it."""

    promise: ClassVar = Promise.AT_LEAST_ONCE
    stores_progress: ClassVar = False

    def __init__(self, settings: StdoutDelivery, identity: DeliveryIdentity, output: int | None = None) -> None:
        del identity
        self._line = line_encoder(settings)
        # without a buffer: a process that ends while the reader waits has nothing to flush
        self._output = sys.stdout.fileno() if output is None else output

    def open(self) -> bytes | None:
        """Do nothing: standard output is open."""
        return None

    def send(self, events: Sequence[Event]) -> None:
        """Print the events, and wait until a pipe or a file has taken them; raises BrokenPipeError if it is closed."""
        lines = memoryview(b"".join(map(self._line, events)))
        try:
            while lines:
                lines = lines[os.write(self._output, lines) :]
        except BrokenPipeError:
            raise
        except OSError as exc:
            raise DestinationUnavailable(f"cannot print events: {exc.strerror or type(exc).__name__}") from exc

    def commit(self, progress: bytes) -> None:
        """Do nothing: `send` has waited."""

    def close(self) -> None:
        """Do nothing: standard output stays open."""


class SocketDestination:
    """Writes events to a TCP connection."""

    promise: ClassVar = Promise.AT_LEAST_ONCE
    stores_progress: ClassVar = False

    def __init__(self, settings: SocketDelivery, identity: DeliveryIdentity) -> None:
        del identity
        self._settings, self._line = settings, line_encoder(settings)
        self._socket: socket.socket | None = None
        self._answers: BinaryIO | None = None
        self._pending: list[str] = []

    def open(self) -> bytes | None:
        """Connect."""
        self._socket = self._connected()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers, self._pending = self._socket.makefile("rb"), []
        return None

    def check(self, topics: Collection[str]) -> None:
        """Connect and disconnect; the receiver sees a connection without lines."""
        del topics
        self._connected().close()

    def send(self, events: Sequence[Event]) -> None:
        """Write the events; the call waits while the receiver does not read."""
        assert self._socket is not None  # noqa: S101 - the contract: opened before
        try:
            self._socket.sendall(b"".join(map(self._line, events)))
        except OSError as exc:
            raise self._broken(exc) from exc
        if self._settings.acknowledge:
            self._pending += [event.id for event in events]

    def commit(self, progress: bytes) -> None:
        """Wait for the acknowledgement of each event, if the receiver sends them."""
        del progress
        assert self._answers is not None  # noqa: S101 - the contract: opened before
        for expected in self._pending:
            try:
                answer = self._answers.readline()
            except OSError as exc:
                raise self._broken(exc) from exc
            if answer.decode(errors="replace").split(maxsplit=1)[:1] != [expected]:
                raise DestinationUnavailable(
                    f"{self._place} acknowledged another event than the expected one, or closed the connection"
                )
        self._pending = []

    def close(self) -> None:
        """Disconnect."""
        # the connection ends when both are closed
        for opened in (self._answers, self._socket):
            if opened is not None:
                opened.close()
        self._answers = self._socket = None

    def _connected(self) -> socket.socket:
        try:
            return socket.create_connection((self._settings.host, self._settings.port), timeout=TIMEOUT)
        except OSError as exc:
            raise self._broken(exc) from exc

    @property
    def _place(self) -> str:
        return f"{self._settings.host}:{self._settings.port}"

    def _broken(self, exc: OSError) -> DestinationUnavailable:
        return DestinationUnavailable(f"the connection to {self._place} failed: {exc.strerror or type(exc).__name__}")
