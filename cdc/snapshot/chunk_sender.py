"""Stream: the way of a copy into the log: hand a chunk over, send its watermark, wait until the log holds it.

The connection for watermarks is the only one to the primary where the source is a standby, so that it is also asked how
other standbys fare.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock
from typing import Any, Final
from uuid import uuid4

from cdc.change import WATERMARK_PREFIX
from cdc.errors import SnapshotInvalidated
from cdc.position import Position
from cdc.postgres.chunk_snapshot import replay_lag
from cdc.postgres.heartbeat import emit_message
from cdc.snapshot.watermark_window import Chunk, PlacedRows, WatermarkWindows
from cdc.table import TableSchema

STOP_CHECK_EVERY: Final = 0.1
"""Seconds between two looks at whether the reader stops."""
WATERMARK_TIMEOUT: Final = 30.0
"""Seconds without anything new from the stream after which a chunk that waits for its watermark is read again."""


class ChunkSender:
    """Of one pipeline; for any thread."""

    def __init__(self, conn: Any, placing: WatermarkWindows, stop: Event) -> None:
        """conn: in autocommit, at the primary."""
        self._conn, self.placing = conn, placing
        self._stop = stop
        self._lock = Lock()

    def place(self, relation: int, made: Callable[[TableSchema | None], Chunk]) -> PlacedRows:
        """Place what is made of the version that the stream has reached, and wait until it is durable."""
        while True:
            token = uuid4().hex
            version = self.placing.open(token, relation, WATERMARK_TIMEOUT, lasting=True)
            with self.placing.closing(token):
                self.send(token, made(version))
                placed = self.outcome(token)
            if not placed.again:
                self.await_durable(placed.position)
                return placed

    def send(self, token: str, chunk: Chunk) -> None:
        """Hand a chunk over and send its watermark."""
        self.placing.offer(token, chunk)
        with self._lock:
            emit_message(self._conn, WATERMARK_PREFIX, token)

    def outcome(self, token: str) -> PlacedRows:
        """What became of it; raises SnapshotInvalidated if that takes too long."""
        return self.placing.outcome(token, WATERMARK_TIMEOUT)

    @property
    def durable(self) -> Position:
        """What the log holds."""
        return self.placing.reached.position

    def await_durable(self, position: Position) -> None:
        """Wait for the log to hold it; raises SnapshotInvalidated if the log does not get on for so long."""
        before, deadline = self.durable, time.monotonic() + WATERMARK_TIMEOUT
        while not self.placing.reached.wait(position, STOP_CHECK_EVERY):
            if (durable := self.durable) != before:
                before, deadline = durable, time.monotonic() + WATERMARK_TIMEOUT
            if time.monotonic() > deadline or self._stop.is_set():
                raise SnapshotInvalidated("the log did not take the chunk")

    def lag(self, standby: str) -> int | None:
        """See replay_lag."""
        with self._lock:
            return replay_lag(self._conn, standby)
