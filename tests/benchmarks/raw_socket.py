"""Raw socket reader: receives the stream of a slot from the socket, and parses nothing. It shows what the server sends.

`python -m tests.benchmarks.raw_socket DSN SLOT PUBLICATION` ends when the stream has the logical message END, and
prints the time of its arrival on the clock of `time.perf_counter`. libpq only logs in and starts the stream. After a
read that did not fill the receive buffer it rests for a millisecond, as a reader that is behind: then the kernel joins
the messages of the server to large packets, which costs the server least.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from contextlib import closing
from typing import Final

from psycopg import pq

from cdc.lsn import Lsn
from cdc.postgres.connection import connect
from cdc.postgres.replication import RECEIVE_BUFFER, StreamOptions

END: Final = b"end of the benchmark"
"""Content of the message behind the last change."""
READ: Final = 4 << 20
"""Most bytes of one read."""
REST: Final = 0.001
STATUS_EVERY: Final = 10.0
"""Seconds between two status updates; without them the server ends the stream after a minute."""
_STATUS: Final = b"d" + struct.pack(">icQQQQB", 38, b"r", 0, 0, 0, 0, 0)


class EndSearch:
    """Reads from a socket, and searches for END, which two reads may divide."""

    def __init__(self) -> None:
        self._buffer = bytearray(len(END) + READ)
        self._view = memoryview(self._buffer)
        self._kept = 0
        self.count = 0
        """Bytes of the last read."""

    def read(self, stream: socket.socket) -> bool:
        """Read once; return whether END has come. Raises ConnectionError if the stream has ended without it."""
        self.count = stream.recv_into(self._view[self._kept :], READ)
        if not self.count:
            raise ConnectionError("the stream ended before the last change")
        size = self._kept + self.count
        if self._buffer.find(END, 0, size) >= 0:
            return True
        self._kept = min(size, len(END) - 1)
        self._view[: self._kept] = bytes(self._view[size - self._kept : size])
        return False


def main() -> int:
    """Read until END."""
    dsn, slot, publication = sys.argv[1:]
    conn = connect(dsn, replication=True)
    command = StreamOptions(slot, publication, Lsn(0)).command(conn.info.server_version)
    with closing(conn), socket.socket(fileno=os.dup(conn.pgconn.socket)) as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        if conn.pgconn.exec_(command.encode()).status != pq.ExecStatus.COPY_BOTH:
            raise RuntimeError(conn.pgconn.error_message.decode())
        stream.setblocking(True)
        search, reported_at = EndSearch(), time.monotonic()
        while not search.read(stream):
            if time.monotonic() - reported_at > STATUS_EVERY:
                stream.sendall(_STATUS)
                reported_at = time.monotonic()
            if search.count < RECEIVE_BUFFER:
                time.sleep(REST)
        print(time.perf_counter(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
