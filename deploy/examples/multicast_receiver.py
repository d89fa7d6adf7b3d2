"""Receiver of a delivery `multicast`: prints each event once, in order, and gets lost ones from the log.

`python multicast_receiver.py GROUP PORT [INTERFACE [START]]`, for example
`python multicast_receiver.py 239.255.7.1 9999 127.0.0.1`. START is the id of the last event that an earlier run has
processed; without it, everything that the log has comes first. Needs only Python.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

HEADER, FRAGMENT = struct.Struct("!4sBBHQQ"), struct.Struct("!II")
EVENT, ANSWER = struct.Struct("!QIBHHIII"), struct.Struct("!BI")
PIECE, HEARTBEAT = 1, 2
AN_EVENT, END, MORE, ERROR = 1, 2, 3, 4


class Event(NamedTuple):
    """One event."""

    topic: str
    id: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    order: tuple[int, int, bool]
    """Position, ordinal, and whether it is the tombstone that follows a delete."""


class RepairFailed(Exception):
    """The sender cannot be asked; the text says why."""


def read_event(content: bytes) -> Event:
    """Read an event."""
    position, ordinal, flags, *lengths = EVENT.unpack_from(content)
    parts, at = [], EVENT.size
    for length in lengths:
        parts.append(content[at : at + length])
        at += length
    topic, name, key, value, headers = parts
    found = tuple(
        (one, base64.b64decode(text) if coded else text.encode()) for one, text, *coded in json.loads(headers)
    )
    order = position, ordinal, name.endswith(b"/tombstone")
    return Event(topic.decode(), name.decode(), None if flags & 1 else key, None if flags & 2 else value, found, order)


class Receiver:
    """Events of a group, each once, in log order."""

    def __init__(self, group: str, port: int, interface: str = "127.0.0.1", start: str = "") -> None:
        self.start = start
        """Where to continue: nothing up to here is missing. Store it to begin there next time."""
        self.reorder_seconds = 0.02
        """How long a missing datagram may be late before it counts as lost."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        self._socket.bind((group, port))
        joined = socket.inet_aton(group) + socket.inet_aton(interface)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
        self._last = (-1, -1, False)
        self._session: int | None = None
        self._expected = self._next = 0
        """Number of the next datagram in order, and above the highest one that was seen or announced."""
        self._waiting: dict[int, bytes] = {}
        self._event = b""
        """Pieces of an event, up to the next one."""
        self._sender: tuple[str, int] | None = None
        self._repair_at = 0.0
        """Time from which on a missing datagram counts as lost; 0 if none is missing."""

    def poll(self, seconds: float) -> Iterator[Event]:
        """Yield events until none has come for some time."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            if self._repair_at and now >= self._repair_at:
                try:
                    yield from self.repair()
                except (OSError, RepairFailed):
                    self._repair_at = time.monotonic() + 0.2
            self._socket.settimeout(max(0.001, min(until, self._repair_at or until) - now))
            try:
                datagram, (host, _) = self._socket.recvfrom(65_535)
            except TimeoutError:
                continue
            for event in self._received(datagram, host):
                until = time.monotonic() + seconds
                yield event

    def repair(self) -> Iterator[Event]:
        """Yield every event of the log after the last one, and forget what was missing.

        The log has an event before it is sent. So the log has everything of which a datagram was seen.
        """
        if self._sender is None:
            raise RepairFailed("no datagram has come yet")
        seen = self._next
        with socket.create_connection(self._sender, timeout=10) as connection, connection.makefile("rwb") as stream:
            kind = MORE
            while kind != END:
                stream.write(self.start.encode() + b"\n")
                stream.flush()
                kind = AN_EVENT
                while kind == AN_EVENT:
                    kind, length = ANSWER.unpack(self._exactly(stream.read(ANSWER.size), ANSWER.size))
                    content = self._exactly(stream.read(length), length)
                    if kind == AN_EVENT:
                        yield from self._if_new(read_event(content))
                    elif kind == ERROR:
                        raise RepairFailed(content.decode())
                    else:
                        self.start = content.decode()
        self._expected, self._waiting, self._event, self._repair_at = seen, {}, b"", 0.0

    def close(self) -> None:
        """Leave the group."""
        self._socket.close()

    def _received(self, datagram: bytes, host: str) -> Iterator[Event]:
        magic, version, kind, port, session, number = HEADER.unpack_from(datagram.ljust(HEADER.size))
        if magic != b"CDCM" or version != 1:
            return
        self._sender = host, port
        after = number + (kind == PIECE)
        if session != self._session:
            # another process sends: the end of the earlier session may be lost
            self._session, self._expected, self._next, self._waiting, self._event = session, -1, after, {}, b""
            self._repair_at = time.monotonic()
            return
        self._next = max(self._next, after)
        if kind == PIECE and number >= self._expected >= 0:
            self._waiting[number] = datagram[HEADER.size :]
        while self._expected in self._waiting:
            yield from self._piece(self._waiting.pop(self._expected))
            self._expected += 1
        if self._expected >= self._next:
            self._repair_at = 0.0
        elif not self._repair_at:
            self._repair_at = time.monotonic() + self.reorder_seconds

    def _piece(self, content: bytes) -> Iterator[Event]:
        length, offset = FRAGMENT.unpack_from(content)
        if offset != len(self._event):
            return  # the rest of an event that a repair has delivered
        self._event += content[FRAGMENT.size :]
        if len(self._event) == length:
            event, self._event = read_event(self._event), b""
            for new in self._if_new(event):
                self.start = new.id
                yield new

    def _if_new(self, event: Event) -> Iterator[Event]:
        if event.order > self._last:
            self._last = event.order
            yield event

    @staticmethod
    def _exactly(content: bytes, length: int) -> bytes:
        if len(content) != length:
            raise RepairFailed("the connection ended")
        return content


def main() -> None:
    """Print events until the process is interrupted."""
    group, port, *more = sys.argv[1:]
    receiver = Receiver(group, int(port), *more)
    while True:
        for event in receiver.poll(1.0):
            print(event.id, event.topic, event.key, event.value, flush=True)


if __name__ == "__main__":
    main()
