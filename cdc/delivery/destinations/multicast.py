"""UDP multicast: each event once to a group, with numbers, heartbeats and repair from the log.

Each datagram has the next number of its session, and a heartbeat has the number that comes next. So a receiver sees
every loss. It then asks by TCP for the events after the last one that it has. The answer comes from the log, in pages,
with the same ids. The sender remembers nothing about receivers, and never waits for one.
"""

from __future__ import annotations

import secrets
import socket
import socketserver
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Event as Flag
from threading import Lock, Thread
from typing import ClassVar, Final

from cdc import failpoint
from cdc.config.destinations import MulticastDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, EventHistory, Promise
from cdc.delivery.destinations.history_pages import answered_page
from cdc.delivery.destinations.multicast_wire import (
    AnswerKind,
    DatagramSource,
    answer,
    datagrams,
    encoded_event,
    heartbeat,
)
from cdc.errors import CdcError, DestinationUnavailable

_REQUEST_SECONDS: Final = 30.0
"""How long a receiver may be silent before its connection ends."""
_LONGEST_REQUEST: Final = 300
_MOST_RECEIVERS: Final = 256
"""Connections at the same time; a receiver above it tries again."""
_BURST: Final = 0.005
"""Seconds of the rate that are sent without a pause."""


class MulticastDestination:
    """One group; receivers join and leave as they like."""

    promise: ClassVar[Promise] = Promise.AT_MOST_ONCE
    stores_progress: ClassVar[bool] = False

    def __init__(self, settings: MulticastDelivery, identity: DeliveryIdentity) -> None:
        self._settings, self._name = settings, identity.name
        self._history: EventHistory | None = None
        self._socket: socket.socket | None = None
        self._repair: RepairServer | None = None
        self._threads: list[Thread] = []
        self._ended = Flag()
        self._lock = Lock()
        self._source = DatagramSource(0, 0)
        self._number = 0
        self._free_at = 0.0
        """Time at which the rate allows the next datagram."""

    def serve_history(self, history: EventHistory) -> None:
        """Answer receivers from this history."""
        self._history = history

    def open(self) -> bytes | None:
        """Begin a session with numbers from 0."""
        self.close()
        settings = self._settings
        try:
            self._repair = RepairServer((settings.interface, settings.repair_port), self._history)
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, settings.ttl)
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            interface = socket.inet_aton(settings.interface)
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
            self._socket.connect((settings.group, settings.port))
        except OSError as exc:
            self.close()
            raise self._failed(exc) from exc
        self._source = DatagramSource(self._repair.server_address[1], secrets.randbits(64))
        self._number, self._ended = 0, Flag()
        serving = Thread(target=self._repair.serve_forever, args=(0.05,), name=f"repair {self._name}", daemon=True)
        beating = Thread(target=self._beat, args=(self._ended,), name=f"heartbeat {self._name}", daemon=True)
        self._threads = [serving, beating]
        for thread in self._threads:
            thread.start()
        return None

    def send(self, events: Sequence[Event]) -> None:
        """Send the datagrams of each event, at most at the rate.

        Of an event that is too large only a number is used. So receivers miss it, and get it by TCP.
        """
        for event in events:
            content = encoded_event(event)
            if len(content) > self._settings.max_event_size:
                with self._lock:
                    self._number += 1
                continue
            for one in datagrams(content, self._number, self._source, self._settings.datagram):
                self._pace(len(one))
                with self._lock:
                    self._transmit(one)
                    self._number += 1

    def commit(self, progress: bytes) -> None:
        """Send a heartbeat, so that receivers see at once whether they have everything."""
        del progress
        with self._lock:
            self._transmit(heartbeat(self._number, self._source))
        failpoint.hit("multicast_sent")

    def close(self) -> None:
        """End the session. Receivers get what they have lost from the next one."""
        self._ended.set()
        repair, self._repair = self._repair, None
        threads, self._threads = self._threads, []
        if repair is not None:
            if threads:
                repair.shutdown()
            repair.server_close()
        for thread in threads:
            thread.join()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _transmit(self, datagram: bytes) -> None:
        if self._socket is None:
            raise DestinationUnavailable("the multicast socket is closed")
        try:
            self._socket.send(datagram)
        except ConnectionRefusedError:
            return  # the answer to an earlier datagram
        except OSError as exc:
            raise self._failed(exc) from exc

    def _pace(self, size: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now - _BURST) + size / self._settings.rate
        if self._free_at > now:
            time.sleep(self._free_at - now)

    def _beat(self, ended: Flag) -> None:
        while not ended.wait(self._settings.heartbeat):
            # the loop sees an error of the socket when it sends the next time
            with self._lock, suppress(DestinationUnavailable):
                self._transmit(heartbeat(self._number, self._source))

    def _failed(self, exc: OSError) -> DestinationUnavailable:
        place = f"{self._settings.group}:{self._settings.port} through {self._settings.interface}"
        return DestinationUnavailable(
            f"delivery {self._name!r} cannot send to {place}: {exc.strerror or type(exc).__name__}",
            remedy="set 'interface' to an address of this machine, and 'repair_port' to a port that is free",
        )


class RepairServer(socketserver.ThreadingTCPServer):
    """Answers receivers that have lost events."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], history: EventHistory | None) -> None:
        self.history = history
        self._open: set[socket.socket] = set()
        super().__init__(address, RepairConnection)

    def verify_request(self, request: object, client_address: object) -> bool:
        """Refuse a connection above the limit."""
        del request, client_address
        return len(self._open) < _MOST_RECEIVERS

    def process_request(self, request: object, client_address: object) -> None:
        """Record a connection, so that `server_close` can end it."""
        assert isinstance(request, socket.socket)  # noqa: S101 - the standard library's type is wider
        self._open.add(request)
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def shutdown_request(self, request: object) -> None:
        """Forget a connection that has ended."""
        self._open.discard(request)  # type: ignore[arg-type]
        super().shutdown_request(request)  # type: ignore[arg-type]

    def server_close(self) -> None:
        """Close the listening socket and all connections."""
        super().server_close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class RepairConnection(socketserver.StreamRequestHandler):
    """Requests of one receiver: lines with the place after which it needs events."""

    timeout = _REQUEST_SECONDS
    server: RepairServer

    def handle(self) -> None:
        """Answer until the receiver disconnects."""
        with suppress(OSError):
            while (line := self.rfile.readline(_LONGEST_REQUEST)).endswith(b"\n"):
                page = answered_page(self.server.history, line[:-1])
                if isinstance(page, CdcError):
                    self.wfile.write(answer(AnswerKind.ERROR, f"{page.code} {page.message}".encode()))
                    continue
                for event in page.events:
                    self.wfile.write(answer(AnswerKind.EVENT, encoded_event(event)))
                kind = AnswerKind.END if page.is_last else AnswerKind.MORE
                self.wfile.write(answer(kind, page.next.encode()))
