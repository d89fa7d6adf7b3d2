"""Chunk sender: registers chunks in watermark windows, sends their watermarks, and waits until the log contains them.

If the source is a standby, the connection for watermarks is the only one to the primary. It therefore also queries the
lag of other standbys.
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
from cdc.postgres.logical_messages import emit_message
from cdc.snapshot.watermark_window import Chunk, PlacedRows, WatermarkWindows
from cdc.table import TableSchema

STOP_CHECK_EVERY: Final = 0.1
"""Seconds between two checks for a stop of the reader."""
WATERMARK_TIMEOUT: Final = 30.0
"""Seconds without progress of the stream after which a chunk that waits for its watermark is read again."""


class ChunkSender:
    """Sender of one pipeline; thread-safe."""

    def __init__(self, conn: Any, windows: WatermarkWindows, stop: Event) -> None:
        """conn: in autocommit mode, to the primary."""
        self._conn, self.windows = conn, windows
        self._stop = stop
        self._lock = Lock()

    def place_chunk(self, relation: int, build: Callable[[TableSchema | None], Chunk]) -> PlacedRows:
        """Build a chunk from the stream's current schema version, insert it, and wait until it is durable."""
        while True:
            token = uuid4().hex
            version = self.windows.open_window(token, relation, WATERMARK_TIMEOUT, outlives_copies=True)
            with self.windows.discard_on_error(token):
                self.send(token, build(version))
                placed = self.wait_for_outcome(token)
            if not placed.must_read_again:
                self.await_durable(placed.position)
                return placed

    def send(self, token: str, chunk: Chunk) -> None:
        """Register a chunk and send its watermark."""
        self.windows.set_chunk(token, chunk)
        with self._lock:
            emit_message(self._conn, WATERMARK_PREFIX, token)

    def wait_for_outcome(self, token: str) -> PlacedRows:
        """Wait for the result of a chunk; raises SnapshotInvalidated after a timeout."""
        return self.windows.wait_for_outcome(token, WATERMARK_TIMEOUT)

    @property
    def durable_position(self) -> Position:
        """Durable position of the log."""
        return self.windows.durable_position.position

    def await_durable(self, position: Position) -> None:
        """Wait until the log contains the position; raises SnapshotInvalidated if the log makes no progress."""
        before, deadline = self.durable_position, time.monotonic() + WATERMARK_TIMEOUT
        while not self.windows.durable_position.wait(position, STOP_CHECK_EVERY):
            if (durable := self.durable_position) != before:
                before, deadline = durable, time.monotonic() + WATERMARK_TIMEOUT
            if time.monotonic() > deadline or self._stop.is_set():
                raise SnapshotInvalidated("the log did not commit the chunk in time, or the reader stops")

    def standby_lag(self, standby: str) -> int | None:
        """Bytes of WAL that a standby has yet to replay; None if it is not connected."""
        with self._lock:
            return replay_lag(self._conn, standby)
