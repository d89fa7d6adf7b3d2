"""The chunk sender registers chunks in watermark windows, sends watermarks, and waits until the log has the chunks.

If the source is a standby, the connection for watermarks is the only connection to the primary. Therefore this module
also queries the primary for the lag of standbys.

A full copy writes a schema row (`s`) before and after the rows of a table. Each schema row is sent as a chunk without
rows of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Event, Lock
from typing import Any, Final, Protocol
from uuid import uuid4

from cdc.errors import ConfigError, SnapshotInvalidated
from cdc.log_row import LOG_SCHEMA, WATERMARK_PREFIX
from cdc.position import Position
from cdc.postgres.chunk_queries import replay_lag
from cdc.postgres.column_identity import EPOCH_SHIFT
from cdc.postgres.logical_messages import emit_message
from cdc.snapshot.watermark_window import Chunk, PlacedRows, WatermarkWindows
from cdc.table import CAPTURED, TableSchema, TableState

STOP_CHECK_EVERY: Final = 0.1
"""Seconds between two checks whether the reader is stopping."""
WATERMARK_TIMEOUT: Final = 30.0
"""Maximum seconds without progress of stream or log while a chunk waits; then the copy is interrupted and retried."""


class LogProgress(Protocol):
    """Access to the durable position of the log, which advances while the reader runs."""

    @property
    def position(self) -> Position:
        """The durable position."""

    def wait(self, position: Position, seconds: float) -> bool:
        """Wait at most `seconds` for the log to contain the position; return True if the log contains it."""


@dataclass(frozen=True, slots=True)
class ReaderLink:
    """Objects that the copying threads share with the reader, across all its replication sessions."""

    windows: WatermarkWindows
    durable: LogProgress
    stop: Event


class ChunkSender:
    """Sends the chunks of one pipeline; thread-safe."""

    def __init__(self, conn: Any, link: ReaderLink) -> None:
        """`conn` is a connection to the primary in autocommit mode."""
        self._conn, self.windows = conn, link.windows
        self._durable, self._stop = link.durable, link.stop
        self._lock = Lock()

    def place_chunk(self, relation: int, build: Callable[[TableSchema | None], Chunk]) -> PlacedRows:
        """Insert a chunk into the stream, and wait until it is durable.

        `build` receives the relation's current schema version, or None if the stream has not described the relation.
        It returns the chunk.
        """
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
        """Register a chunk in the window with this token, and send its watermark."""
        self.windows.set_chunk(token, chunk)
        with self._lock:
            emit_message(self._conn, WATERMARK_PREFIX, token)

    def wait_for_outcome(self, token: str) -> PlacedRows:
        """Wait until the watermark of a window arrives, and return the outcome of its chunk.

        Raises SnapshotInvalidated if the replication session ends, or if the stream makes no progress for
        WATERMARK_TIMEOUT.
        """
        return self.windows.wait_for_outcome(token, WATERMARK_TIMEOUT)

    @property
    def durable_position(self) -> Position:
        """Durable position of the log."""
        return self._durable.position

    def await_durable(self, position: Position) -> None:
        """Wait until the log contains the position.

        Raises SnapshotInvalidated if the log makes no progress for WATERMARK_TIMEOUT, or if the reader stops.
        """
        before, deadline = self.durable_position, time.monotonic() + WATERMARK_TIMEOUT
        while not self._durable.wait(position, STOP_CHECK_EVERY):
            if (durable := self.durable_position) != before:
                before, deadline = durable, time.monotonic() + WATERMARK_TIMEOUT
            if self._stop.is_set():
                raise SnapshotInvalidated(
                    "the reader stopped before the log contained a chunk of a table: "
                    "the next reader reads the chunk again"
                )
            if time.monotonic() > deadline:
                raise SnapshotInvalidated(
                    f"the log made no progress for {WATERMARK_TIMEOUT:g} s while a chunk of a table was pending: "
                    "the reader reads the chunk again"
                )

    def standby_lag(self, standby: str) -> int | None:
        """Return the bytes of WAL that a standby has not applied yet; None if it is not connected."""
        with self._lock:
            return replay_lag(self._conn, standby)


def schema_from_catalog(version: TableSchema, now: TableSchema | None, epoch: int) -> TableSchema:
    """Return the current schema of a table, with the relation that the table has in the log.

    `version` is the schema in the log, and `now` the schema in the system catalogs of Postgres. Raises ConfigError if
    the table no longer exists. For a relation from an earlier epoch, also raises ConfigError if its columns changed.
    """
    if now is None:
        raise ConfigError(
            f"table {version.topic!r} cannot be copied: it no longer exists at the source",
            remedy="run 'cdc tables ls -c FILE' to see the tables",
        )
    if version.relation == epoch << EPOCH_SHIFT | version.oid:
        return replace(now, relation=version.relation)
    if [(c.name, c.type_oid) for c in now.sent] != [(c.name, c.type_oid) for c in version.sent]:
        raise ConfigError(
            f"table {version.topic!r} cannot be copied: its columns differ from the columns of an earlier epoch "
            "in the log",
            remedy="run 'cdc slots recover -c FILE --new-epoch'",
        )
    return replace(version, standing=now.standing)


def with_state(version: TableSchema, state: TableState) -> TableSchema:
    """Return the schema version with the given state and without a reason for the state."""
    return replace(version, state=state, reason=None)


def schema_chunk(version: TableSchema, generation: Position | None = None) -> Chunk:
    """Return a chunk without rows that writes the schema version `version` to the log.

    If `generation` is given, the chunk also ends a full copy; `generation` is the position at which this copy began.
    """
    return Chunk(version.relation, version.topic, LOG_SCHEMA.empty_table(), version, generation)


def complete_table_chunk(version: TableSchema) -> Chunk:
    """Return a chunk without rows that marks a table as completely copied; targets delete no rows at this chunk."""
    return schema_chunk(version, Position(0))


def end_of_first_copy_chunk(version: TableSchema | None) -> Chunk:
    """Return the chunk that marks a table as live after all of its rows were read for the first time.

    Raises ConfigError if the table is no longer captured: a table may be dropped, or lose changes, after its last row
    was read.
    """
    if version is None or version.state not in CAPTURED:
        raise not_copyable_error(version)
    return complete_table_chunk(with_state(version, TableState.LIVE))


def end_of_copy_chunk(version: TableSchema, began: Position) -> Chunk:
    """Return the chunk that ends a full copy; targets then delete all rows that are older than position `began`.

    Raises ConfigError if the table is no longer in state `snapshotting`.
    """
    if version.state is not TableState.SNAPSHOTTING:
        raise not_copyable_error(version)
    return schema_chunk(with_state(version, TableState.LIVE), began)


def not_copyable_error(version: TableSchema | None) -> ConfigError:
    """Return the error for a table that cannot be copied in its current state.

    `version` is None if neither the log nor the stream contains a schema of the table.
    """
    if version is None:
        return ConfigError(
            "a table of the backfill cannot be copied: neither the log nor the stream contains its schema",
            remedy="run 'cdc tables ls -c FILE' to see whether the table is captured, then try again",
        )
    again = (
        f"copy the table again: cdc tables resync '{version.topic}'"
        if version.state is TableState.NEEDS_RESYNC
        else "run 'cdc tables ls -c FILE' to see the state of the table"
    )
    return ConfigError(
        f"table {version.topic!r} cannot be copied: it became {version.state.value}: {version.reason}", remedy=again
    )
