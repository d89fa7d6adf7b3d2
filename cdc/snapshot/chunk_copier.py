"""The chunk copier copies a table chunk by chunk over one connection into the stream.

Every chunk is read in its own snapshot, registered in a watermark window, and followed by a watermark. A chunk counts
as copied once the log contains it; until then it is pending. While the stream is idle, a chunk is read although a
few earlier chunks are pending. While the stream receives rows, a chunk is read only if no other chunk is pending. This
limits the memory, and the time that changes wait behind chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any, Final, Protocol
from uuid import uuid4

import pyarrow as pa

from cdc.bucket_files import Root
from cdc.errors import ConfigError, SnapshotInvalidated
from cdc.failpoint import hit
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.position import Position
from cdc.postgres.backfill_selection import bounded_read, missing_keys
from cdc.postgres.chunk_queries import (
    BlockRange,
    block_range_query,
    has_columns,
    key_range_query,
    snapshot_transaction,
    table_query,
)
from cdc.postgres.connection import cancel_statement, is_standby
from cdc.postgres.publication import published_schema
from cdc.postgres.sql_ascii import RepairLines
from cdc.snapshot.chunk_plan import ChunkLimits, ChunkPlan, ChunkRange, ChunkResult
from cdc.snapshot.chunk_rows import ChunkRows, ChunkTooLarge, NotRead, SeesAll, read_rows
from cdc.snapshot.chunk_sender import (
    WATERMARK_TIMEOUT,
    ChunkSender,
    not_copyable_error,
    schema_chunk,
    schema_from_catalog,
)
from cdc.snapshot.copy_limits import ChunkBudget, CopyRateLimit, PauseGate
from cdc.snapshot.executor_exchange import ExecutorTasks
from cdc.snapshot.watermark_window import WINDOW_LIMIT, Chunk, PlacedRows
from cdc.table import CAPTURED, TableSchema

CHUNKS_AHEAD: Final = 8
"""Maximum number of chunks that wait to become durable while each connection reads another chunk.

One commit of the log can contain several waiting chunks. After a crash, all chunks that are not durable are read again.
"""
SLOT_PAUSE: Final = 0.1
"""Seconds that a connection waits for room in the ChunkBudget before it checks for a pause or a stop."""
KEYLESS_ATTEMPTS: Final = 100
"""Maximum number of attempts to read a table without a key while the table changes."""
VISIBILITY_PAUSE: Final = 0.05
"""Seconds before the next snapshot, if the last one did not see a transaction that the stream has already sent."""
KEYLESS_BYTES: Final = 128 * 1024 * 1024
"""Maximum bytes of Arrow rows for a table without a key, because all its rows are in memory at the same time."""

_BLANK: Final[dict[str, Any]] = dict.fromkeys(LOG_SCHEMA.names) | {
    "position": 0,
    "ordinal": 0,
    "xid": 0,
    "committed_at": 0,
    "partial": False,
}
"""Default column values of a delete row that has no position yet."""


class CopyStopped(Exception):
    """Raised to end a copy: the copy was cancelled, or the reader stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyContext:
    """Objects and limits that all connections of a copy share."""

    sender: ChunkSender
    publication: str
    repair: RepairLines
    limits: ChunkLimits
    rate_limit: CopyRateLimit
    gate: PauseGate
    max_chunks: int
    """Maximum number of chunks of one table that are being read or not yet recorded as durable."""
    log: Root
    stop: Event
    executors: ExecutorTasks
    server: str
    """Start time of the source server."""

    def new_budget(self, executor_tasks: int = 0) -> ChunkBudget:
        """Return a new chunk budget for one table or one key list, which executors read if there are any."""
        if executor_tasks:
            return ChunkBudget(executor_tasks + min(executor_tasks, CHUNKS_AHEAD))
        return ChunkBudget(self.max_chunks)


@dataclass(frozen=True, slots=True)
class _SentChunk:
    """A chunk whose watermark was sent."""

    token: str
    read: ChunkResult
    placed: PlacedRows | None = None


class RemoteReads(Protocol):
    """Reads chunks by another process than the reader."""

    def read(self, schema: TableSchema, part: ChunkRange, sees_all: SeesAll) -> ChunkRows | NotRead:
        """Read the chunk. Raises ChunkTooLarge, and the errors of the other process."""

    def cancel(self) -> None:
        """Make a running `read` end, from another thread."""


class ChunkCopier:
    """Reads the chunks of one table and sends them into the stream; not thread-safe."""

    def __init__(
        self, conn: Any, context: CopyContext, relation: int, address: str | None, remote: RemoteReads | None = None
    ) -> None:
        """`conn` reads the chunks, or only the system catalogs of Postgres if `remote` reads the chunks."""
        self._conn, self._context, self._remote = conn, context, remote
        self._relation, self._address = relation, address
        self._waiting: deque[_SentChunk] = deque()
        self._placed: deque[_SentChunk] = deque()
        self._streamed, self._is_idle = 0, True

    def cancel_query(self) -> None:
        """Cancel the running query, from another thread than the one that copies; do nothing if none runs."""
        if self._remote is not None:
            self._remote.cancel()
        cancel_statement(self._conn)

    def copy(self, plan: ChunkPlan, budget: ChunkBudget, on_durable: Callable[[ChunkResult, int], None]) -> None:
        """Read and send all chunks of the plan.

        For each durable chunk, call `on_durable` with the result of the chunk and its row count. All connections of the
        copy share the budget. After the caller has recorded a chunk as durable, it must release the chunk from the
        budget. Raises CopyStopped if the copy ends early, SnapshotInvalidated if the copy must be retried, and
        ConfigError if an operator must act. Errors of the source are raised unchanged.
        """
        more = True
        while more or self._waiting or self._placed:
            if more and budget.acquire(alone=self._is_busy()):
                more = (part := plan.next_range()) is not None
                if part is None or not self._read_and_send(part, plan):
                    budget.release()
            elif self._placed:  # the oldest first: recording it frees budget
                self._context.sender.await_durable(_position(self._placed[0]))
            elif self._waiting:
                self._placed.append(self._await_placement(self._waiting.popleft(), plan))
            elif self._context.gate.wait_until_open():
                budget.wait_until_free(SLOT_PAUSE, alone=self._is_busy())  # the other connections use the whole budget
            else:
                raise CopyStopped
            self._report_durable(on_durable)

    def _is_busy(self) -> bool:
        """Return True if the stream has received rows since this connection began its last chunk.

        It is never busy for chunks that are encoded already: to insert them takes almost no time.
        """
        if self._remote is not None:
            return False
        return not self._is_idle or self._context.sender.windows.streamed_rows != self._streamed

    def _read_and_send(self, part: ChunkRange, plan: ChunkPlan) -> bool:
        """Read and send one chunk and return True; if the range is too large, split it and return False."""
        try:
            sent = self._send(part)
        except ChunkTooLarge:
            plan.split(part)
            return False
        plan.record_read(sent.read)
        self._waiting.append(sent)
        return True

    def copy_keyless(self, build_schema: Callable[[TableSchema, TableSchema | None], TableSchema]) -> PlacedRows:
        """Replace all rows of a table without a key in one transaction, and return once they are durable.

        `build_schema` receives the schema version of the stream and the version that the snapshot sees in the system
        catalogs. It returns the version to read the rows with. Raises ConfigError if the table cannot be copied, for
        example because it is larger than KEYLESS_BYTES.
        """
        context = self._context
        if is_standby(self._conn):
            raise ConfigError(
                "a table without a key cannot be copied from a standby: pg_current_snapshot() on a standby does not "
                "list the running transactions",
                remedy="give the table a primary key, or capture from the primary",
            )
        for _ in range(KEYLESS_ATTEMPTS):
            if not context.gate.wait_until_open():
                raise CopyStopped
            token = uuid4().hex
            known = context.sender.windows.open_window(token, self._relation, WATERMARK_TIMEOUT, keyless=True)
            if known is None:
                raise ConfigError(
                    "a table without a key cannot be copied: neither the log nor the stream contains its schema",
                    remedy="run 'cdc tables ls -c FILE' to see whether the table is captured, then try again",
                )
            with context.sender.windows.discard_on_error(token), snapshot_transaction(self._conn, known) as visibility:
                schema = build_schema(known, published_schema(self._conn, known.oid, context.publication))
                seen = context.sender.windows.sees_all(token, visibility)
                rows = self._everything(schema) if seen else LOG_SCHEMA.empty_table()
            if not seen:
                context.stop.wait(VISIBILITY_PAUSE)
                continue
            hit("chunk_read")
            chunk = Chunk(self._relation, schema.topic, rows, schema, "here", self._address, visibility)
            context.sender.send(token, chunk)
            placed = context.sender.wait_for_outcome(token)
            if not placed.must_read_again:
                context.sender.await_durable(placed.position)
                return placed
        reason = (
            f"while it was read, its schema changed or it had more than {WINDOW_LIMIT >> 20} MiB of changes"
            if seen
            else "snapshots do not see a transaction that the stream has already sent"
        )
        raise SnapshotInvalidated(
            f"table {schema.topic!r} without a key was not copied in {KEYLESS_ATTEMPTS} attempts: {reason}"
        )

    def _everything(self, schema: TableSchema) -> pa.Table:
        try:
            query = table_query(self._conn, schema, self._context.publication)
            return read_rows(self._conn, query, schema, self._context.repair(schema), KEYLESS_BYTES).table
        except ChunkTooLarge:
            raise ConfigError(
                f"table {schema.topic!r} cannot be copied: it has no key and more than {KEYLESS_BYTES >> 20} MiB "
                "of rows",
                remedy="give the table a primary key, or copy all tables with 'cdc slots recover --new-epoch'",
            ) from None

    def _await_placement(self, sent: _SentChunk, plan: ChunkPlan) -> _SentChunk:
        """Wait until the chunk is merged with the changes of its window, and return the chunk with the outcome.

        If the chunk cannot be merged, the method reads it again, sends it again, and waits again.
        """
        while True:
            placed = self._context.sender.wait_for_outcome(sent.token)
            if not placed.must_read_again:
                return replace(sent, placed=placed)
            sent = replace(self._send(plan.range_to_reread(sent.read)), read=sent.read)

    def _report_durable(self, on_durable: Callable[[ChunkResult, int], None]) -> None:
        """Call `on_durable` for the chunks that have become durable."""
        durable = self._context.sender.durable_position
        while self._placed and _position(self._placed[0]) <= durable:
            placed_chunk = self._placed.popleft()
            on_durable(placed_chunk.read, placed_chunk.placed.rows if placed_chunk.placed else 0)
            hit("chunk_durable")

    def _send(self, part: ChunkRange) -> _SentChunk:
        context, read = self._context, self._read if self._remote is None else self._remote.read
        while True:
            if not context.gate.wait_until_open():
                raise CopyStopped
            token = uuid4().hex
            schema = context.sender.windows.open_window(token, self._relation, WATERMARK_TIMEOUT)
            if schema is None or schema.state not in CAPTURED:
                raise not_copyable_error(schema)
            with context.sender.windows.discard_on_error(token):
                rows = read(schema, part, partial(context.sender.windows.sees_all, token))
            if isinstance(rows, ChunkRows):
                break
            context.stop.wait(VISIBILITY_PAUSE) if rows is NotRead.NOT_VISIBLE else self._renew()
        hit("chunk_read")
        chunk = Chunk(schema.relation, schema.topic, rows.table, address=self._address, encoded=rows.encoded)
        context.sender.send(token, chunk)
        context.rate_limit.throttle(rows.count, rows.text_bytes)
        before, self._streamed = self._streamed, context.sender.windows.streamed_rows
        self._is_idle = self._streamed == before
        return _SentChunk(token, ChunkResult.of(part, rows, is_idle=self._is_idle))

    def _renew(self) -> None:
        """Read the table's current schema version from the system catalogs of Postgres, and write it to the log.

        This is needed if a snapshot has other columns than the stream's last schema version of the table. Postgres
        sends a new schema version only before the next change of the table.
        """
        stream = self._context.sender

        def build_schema(version: TableSchema | None) -> Chunk:
            if version is None or version.state not in CAPTURED:
                raise not_copyable_error(version)
            now = published_schema(self._conn, version.oid, self._context.publication)
            seen = schema_from_catalog(version, now, stream.durable_position.epoch)
            return schema_chunk(replace(seen, state=version.state, reason=version.reason))

        stream.place_chunk(self._relation, build_schema)

    def _read(self, schema: TableSchema, part: ChunkRange, sees_all: SeesAll) -> ChunkRows | NotRead:
        """Read a chunk over the connection."""
        leaf = part.rows.leaf if isinstance(part.rows, BlockRange) else None
        with snapshot_transaction(self._conn, schema, leaf) as visibility:
            if not has_columns(self._conn, schema):
                return NotRead.OTHER_COLUMNS
            return self._rows_of(schema, part) if sees_all(visibility) else NotRead.NOT_VISIBLE

    def _rows_of(self, schema: TableSchema, part: ChunkRange) -> ChunkRows:
        conn, publication, span = self._conn, self._context.publication, part.rows
        limit, repair = self._context.limits.bytes_of(part), self._context.repair(schema)
        if isinstance(span, BlockRange):
            return read_rows(conn, block_range_query(conn, schema, span, publication), schema, repair, limit)
        with bounded_read(conn, schema, span.where):
            query = key_range_query(conn, schema, span, part.limit, publication)
            rows = read_rows(conn, query, schema, repair, limit)
        if part.delete_missing and span.keys is not None:
            deletions = deletion_rows(schema, missing_keys(conn, schema, span.keys, publication))
            rows = replace(rows, table=pa.concat_tables([rows.table, deletions]))
        return rows


def _position(placed_chunk: _SentChunk) -> Position:
    assert placed_chunk.placed is not None  # noqa: S101 - placed before
    return placed_chunk.placed.position


def deletion_rows(schema: TableSchema, keys: Sequence[tuple[str, ...]]) -> pa.Table:
    """Return a table in LOG_SCHEMA with one delete row per key; the column `before` contains the key values."""
    fields = _BLANK | {"relation": schema.relation, "topic": schema.topic, "op": Operation.DELETE.value}
    key_columns = [(column.id, column.key) for column in schema.sent if column.key is not None]
    rows = [fields | {"key": list(key), "before": [(column, key[n]) for column, n in key_columns]} for key in keys]
    return pa.Table.from_pylist(rows, LOG_SCHEMA)
