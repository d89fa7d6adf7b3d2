"""StatsD: sums of counters and newest values of gauges by UDP, one line per metric and commit.

The value of each event is a line such as `orders.placed:1|c`. Lines are added up until `commit`, because one datagram
with a sum is lost less often than many with ones. A datagram that is lost is not sent again, and a batch whose progress
was not stored is counted twice: the numbers are approximate. The exact ones are in the log.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from typing import ClassVar

from cdc import failpoint
from cdc.config.destinations import StatsdDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, Promise
from cdc.errors import DestinationUnavailable


class StatsdDestination:
    """A StatsD server."""

    promise: ClassVar[Promise] = Promise.AT_MOST_ONCE
    stores_progress: ClassVar[bool] = False

    def __init__(self, settings: StatsdDelivery, identity: DeliveryIdentity) -> None:
        del identity
        self._settings = settings
        self._socket: socket.socket | None = None
        self._sums: dict[str, Decimal] = {}
        self._newest: dict[str, Decimal] = {}

    def open(self) -> bytes | None:
        """Find the address of the server; UDP has no connection that could fail."""
        self.close()
        try:
            found = socket.getaddrinfo(self._settings.host, self._settings.port, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, address = found[0]
            self._socket = socket.socket(family, kind, protocol)
            self._socket.connect(address)
        except OSError as exc:
            self.close()
            raise DestinationUnavailable(
                f"the StatsD server {self._settings.host!r} cannot be found: {exc.strerror or type(exc).__name__}"
            ) from exc
        return None

    def check(self, topics: Collection[str]) -> None:
        """Find the address of the server; UDP does not say whether it listens."""
        del topics
        try:
            self.open()
        finally:
            self.close()

    def send(self, events: Sequence[Event]) -> None:
        """Add the values up."""
        for event in events:
            name, _, rest = (event.value or b"").decode().rpartition(":")
            value, _, kind = rest.partition("|")
            if kind == "c":
                self._sums[name] = self._sums.get(name, Decimal(0)) + Decimal(value)
            elif kind == "g":
                self._newest[name] = Decimal(value)

    def commit(self, progress: bytes) -> None:
        """Send what was added up; a server that does not listen loses it."""
        del progress
        if self._socket is None:
            raise DestinationUnavailable("the StatsD client is closed")
        for datagram in _datagrams(list(self._lines()), self._settings.datagram):
            try:
                self._socket.send(datagram)
            except ConnectionRefusedError:
                continue  # the answer to an earlier datagram: nobody listens
            except OSError as exc:
                raise DestinationUnavailable(
                    f"the StatsD server {self._settings.host!r} cannot be reached: {exc.strerror or type(exc).__name__}"
                ) from exc
        failpoint.hit("statsd_sent")
        self._sums, self._newest = {}, {}

    def close(self) -> None:
        """Forget the batch."""
        self._sums, self._newest = {}, {}
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _lines(self) -> Iterator[bytes]:
        for name, total in self._sums.items():
            yield f"{name}:{total:f}|c".encode()
        for name, value in self._newest.items():
            # a sign means a difference, so a negative value follows a zero in the same datagram
            yield f"{name}:0|g\n{name}:{value:f}|g".encode() if value < 0 else f"{name}:{value:f}|g".encode()


def _datagrams(lines: Sequence[bytes], most: int) -> Iterator[bytes]:
    """Yield the lines in as few datagrams as fit."""
    waiting = b""
    for line in lines:
        if waiting and len(waiting) + 1 + len(line) > most:
            yield waiting
            waiting = b""
        waiting = waiting + b"\n" + line if waiting else line
    if waiting:
        yield waiting
