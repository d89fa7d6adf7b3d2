"""Chunk sender: registers chunks in watermark windows, sends their watermarks, and waits until the log contains them.

If the source is a standby, the connection for watermarks is the only one to the primary. It therefore also queries the
lag of other standbys.

A copy also writes `s` rows before and after the rows of a table: each is a chunk without rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Event, Lock
from typing import Any, Final, Protocol
from uuid import uuid4

from cdc.change import LOG_SCHEMA, WATERMARK_PREFIX
from cdc.errors import ConfigError, SnapshotInvalidated
from cdc.position import Position
from cdc.postgres.chunk_snapshot import replay_lag
from cdc.postgres.column_identity import EPOCH_SHIFT
from cdc.postgres.logical_messages import emit_message
from cdc.snapshot.watermark_window import Chunk, PlacedRows, WatermarkWindows
from cdc.table import TableSchema, TableState

STOP_CHECK_EVERY: Final = 0.1
"""Seconds between two checks for a stop of the reader."""
WATERMARK_TIMEOUT: Final = 30.0
"""Seconds without progress of the stream after which a chunk that waits for its watermark is read again."""


class LogProgress(Protocol):
    """The durable position of the log, which the reader advances."""

    @property
    def position(self) -> Position:
        """The last durable position."""

    def wait(self, position: Position, seconds: float) -> bool:
        """Wait until the log contains the position, at most `seconds`; returns whether it does."""


@dataclass(frozen=True, slots=True)
class ReaderLink:
    """Objects that copying threads share with the reader; they outlive replication sessions."""

    windows: WatermarkWindows
    durable: LogProgress
    stop: Event


class ChunkSender:
    """Sender of one pipeline; thread-safe."""

    def __init__(self, conn: Any, link: ReaderLink) -> None:
        """conn: in autocommit mode, to the primary."""
        self._conn, self.windows = conn, link.windows
        self._durable, self._stop = link.durable, link.stop
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
        return self._durable.position

    def await_durable(self, position: Position) -> None:
        """Wait until the log contains the position; raises SnapshotInvalidated if the log makes no progress."""
        before, deadline = self.durable_position, time.monotonic() + WATERMARK_TIMEOUT
        while not self._durable.wait(position, STOP_CHECK_EVERY):
            if (durable := self.durable_position) != before:
                before, deadline = durable, time.monotonic() + WATERMARK_TIMEOUT
            if time.monotonic() > deadline or self._stop.is_set():
                raise SnapshotInvalidated(
                    "a chunk of a copy was not committed to the log in time, or the reader is stopping"
                )

    def standby_lag(self, standby: str) -> int | None:
        """Bytes of WAL that a standby has yet to replay; None if it is not connected."""
        with self._lock:
            return replay_lag(self._conn, standby)


def schema_from_catalog(version: TableSchema, now: TableSchema | None, epoch: int) -> TableSchema:
    """The table as the catalogue shows it, with the log's relation and column numbers.

    Raises ConfigError if the table is gone, or if its columns differ from those of an earlier epoch.
    """
    if now is None:
        raise ConfigError(f"the source no longer has table {version.topic!r}")
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
    """The version in another state, without a reason."""
    return replace(version, state=state, reason=None)


def schema_chunk(version: TableSchema, generation: Position | None = None) -> Chunk:
    """A chunk without rows that writes a schema version, and ends a full copy if `generation` is given."""
    return Chunk(version.relation, version.topic, LOG_SCHEMA.empty_table(), version, generation)


def complete_table_chunk(version: TableSchema) -> Chunk:
    """A chunk without rows that marks a table as complete without a copy; targets keep all its rows."""
    return schema_chunk(version, Position(0))


def end_of_copy_chunk(version: TableSchema, began: Position) -> Chunk:
    """The chunk that ends a full copy; targets then delete rows older than its start."""
    if version.state is not TableState.SNAPSHOTTING:
        raise not_copyable_error(version)
    return schema_chunk(with_state(version, TableState.LIVE), began)


def not_copyable_error(version: TableSchema | None) -> ConfigError:
    """The error for a copy whose table is in a state that does not allow it."""
    if version is None:
        return ConfigError("the table cannot be copied: it is not captured, or the stream has not yet sent its columns")
    again = (
        f"copy the table again: cdc tables resync '{version.topic}'"
        if version.state is TableState.NEEDS_RESYNC
        else None
    )
    return ConfigError(f"table {version.topic!r} became {version.state.value}: {version.reason}", remedy=again)
