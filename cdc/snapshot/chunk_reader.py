"""Chunks: one connection of a copy reads part after part and sends each on its way into the stream.

A part is read under a snapshot of its own; its rows are handed over and their watermark is sent. Few are on their way
while the next is read, and one alone while the stream brings rows: neither memory nor those rows, which come behind it,
have much to bear. A part counts once the log holds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Condition, Event
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa

from cdc.change import LOG_SCHEMA
from cdc.errors import ConfigError, SnapshotInvalidated
from cdc.failpoint import hit
from cdc.log.object_path import Root
from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.position import Position
from cdc.postgres.chunk_snapshot import (
    BlockRange,
    block_range_query,
    has_columns,
    key_range_query,
    snapshot_transaction,
    table_query,
)
from cdc.postgres.copy import copy_rows
from cdc.postgres.heartbeat import is_standby
from cdc.postgres.keys import missing_keys
from cdc.postgres.publication_columns import published_schema
from cdc.postgres.text_repair import RepairLines
from cdc.postgres.where_clause import bounded_read
from cdc.snapshot.chunk_plan import IDLE_FACTOR, ChunkLimits, ChunkPlan, ChunkRange, ChunkResult
from cdc.snapshot.chunk_sender import WATERMARK_TIMEOUT, ChunkSender
from cdc.snapshot.missing_keys import deletion_rows
from cdc.snapshot.rate_limit import CopyRateLimit
from cdc.snapshot.schema_rows import not_copyable_error, schema_chunk, schema_from_catalog
from cdc.snapshot.watermark_window import Chunk, PlacedRows
from cdc.table import CAPTURED, TableSchema

CHUNKS_AHEAD: Final = 8
"""Chunks on their way to the log beside those that connections read: some share a commit, and all are read again after
a crash."""
SLOT_PAUSE: Final = 0.1
"""Seconds until a connection without a slot looks whether it may still read."""
KEYLESS_ATTEMPTS: Final = 100
"""Times that a table without a key is read before it is left for a quieter moment."""
VISIBILITY_PAUSE: Final = 0.05
"""Seconds before another snapshot when one does not see what the stream has brought already."""
KEYLESS_BYTES: Final = 128 * 1024 * 1024
"""Of the rows of a table without a key, as Arrow, which all go into one transaction."""


class CopyStopped(Exception):
    """It was cancelled, or the reader stops."""


class ChunkTooLarge(Exception):
    """A part has more rows than may be in memory."""


class ChunkBudget:
    """How many chunks are in hand, of all connections that copy a table: from its reading until it is recorded."""

    def __init__(self, count: int) -> None:
        self._changed, self._count, self._taken = Condition(), count, 0

    def take(self, *, alone: bool) -> bool:
        """Whether one more may be read now; alone: only if none is on its way, for the stream waits behind each."""
        with self._changed:
            if not self._is_free(alone=alone):
                return False
            self._taken += 1
            return True

    def wait(self, seconds: float, *, alone: bool) -> None:
        """Until one could be taken, or so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_free(alone=alone), seconds)

    def give_back(self, count: int = 1) -> None:
        """So many are recorded as durable, or were not read."""
        with self._changed:
            self._taken -= count
            self._changed.notify_all()

    def _is_free(self, *, alone: bool) -> bool:
        return self._taken < (1 if alone else self._count)


class PauseGate:
    """Whether the connections of a copy may read; they wait in front of it while the work is paused."""

    def __init__(self) -> None:
        self._changed, self._open, self._ended = Condition(), True, False

    def set(self, *, is_open: bool) -> None:
        """Let them through, or not."""
        with self._changed:
            self._open = is_open
            self._changed.notify_all()

    def end(self) -> None:
        """Let nobody through any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Be as at the beginning."""
        with self._changed:
            self._open, self._ended = True, False

    def through(self) -> bool:
        """Wait to be let through; False when nobody will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._ended)
            return not self._ended


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyContext:
    """What the connections of a copy have in common."""

    stream: ChunkSender
    publication: str
    mend: RepairLines
    limits: ChunkLimits
    pace: CopyRateLimit
    gate: PauseGate
    in_hand: int
    """Chunks of a table that may be in memory, or not recorded."""
    log: Root
    stop: Event


@dataclass(frozen=True, slots=True)
class _SentChunk:
    """A part whose watermark was sent."""

    token: str
    read: ChunkResult
    placed: PlacedRows | None = None


class ChunkReader:
    """Reads a table's parts over one connection; used by one thread."""

    def __init__(self, conn: Any, around: CopyContext, relation: int, address: str | None) -> None:
        self._conn, self._around = conn, around
        self._relation, self._address = relation, address
        self._waiting: deque[_SentChunk] = deque()
        self._landed: deque[_SentChunk] = deque()
        self._streamed, self._quiet = 0, True

    def copy(self, cut: ChunkPlan, slots: ChunkBudget, note: Callable[[ChunkResult, int], None]) -> None:
        """Read all that the cut gives out; note is told of every part that is durable, with the rows placed.

        slots: one for each chunk that may be in hand, shared with the other connections; whoever note tells gives them
        back.
        Raises Stopped, SnapshotInvalidated and source errors that may go by themselves, ConfigError for what a
        person has to change.
        """
        more = True
        while more or self._waiting or self._landed:
            if more and slots.take(alone=self._is_busy()):
                more = (part := cut.take()) is not None
                if part is None or not self._read_and_send(part, cut):
                    slots.give_back()
            elif self._landed:  # first the oldest: when it is recorded the next can be read
                self._around.stream.await_durable(_position(self._landed[0]))
            elif self._waiting:
                self._landed.append(self._land(self._waiting.popleft(), cut))
            elif self._around.gate.through():
                slots.wait(SLOT_PAUSE, alone=self._is_busy())  # the others have all
            else:
                raise CopyStopped
            self._note(note)

    def _is_busy(self) -> bool:
        """Whether the stream has brought rows since the last part was begun."""
        return not self._quiet or self._around.stream.placing.streamed != self._streamed

    def _read_and_send(self, part: ChunkRange, cut: ChunkPlan) -> bool:
        """Whether it is on its way; else it was too large."""
        try:
            sent = self._send(part)
        except ChunkTooLarge:
            cut.too_large(part)
            return False
        cut.came(sent.read)
        self._waiting.append(sent)
        return True

    def whole(self, made: Callable[[TableSchema, TableSchema | None], TableSchema]) -> PlacedRows:
        """Let a table without a key begin anew with all its rows; returns once that is durable.

        made: the version of the stream and what the catalogue says, in one snapshot with the rows → the version to
        read them by. Raises ConfigError if it is too large to be in memory at once.
        """
        around = self._around
        if is_standby(self._conn):
            raise ConfigError("a table has no key, and a standby does not tell which transactions its snapshot sees")
        for _ in range(KEYLESS_ATTEMPTS):
            if not around.gate.through():
                raise CopyStopped
            token = uuid4().hex
            known = around.stream.placing.open(token, self._relation, WATERMARK_TIMEOUT, whole=True)
            if known is None:
                raise ConfigError("the table is unknown")
            with around.stream.placing.closing(token), snapshot_transaction(self._conn, known) as visibility:
                schema = made(known, published_schema(self._conn, known.oid, around.publication))
                seen = around.stream.placing.sees_all(token, visibility)
                rows = self._everything(schema) if seen else LOG_SCHEMA.empty_table()
            if not seen:
                around.stop.wait(VISIBILITY_PAUSE)
                continue
            hit("chunk_read")
            chunk = Chunk(self._relation, schema.topic, rows, schema, "here", self._address, visibility)
            around.stream.send(token, chunk)
            placed = around.stream.outcome(token)
            if not placed.again:
                around.stream.await_durable(placed.position)
                return placed
        raise SnapshotInvalidated(f"the table changed faster than it could be read, {KEYLESS_ATTEMPTS} times")

    def _everything(self, schema: TableSchema) -> pa.Table:
        try:
            query = table_query(self._conn, schema, self._around.publication)
            return self._rows(schema, query, KEYLESS_BYTES)[0]
        except ChunkTooLarge:
            raise ConfigError(
                f"{schema.topic!r} has no key and more than {KEYLESS_BYTES >> 20} MiB of rows: too much for one copy",
                remedy="give it a primary key, or copy everything with 'cdc slots recover --new-epoch'",
            ) from None

    def _land(self, sent: _SentChunk, cut: ChunkPlan) -> _SentChunk:
        """The part once it was placed, after another read where the first was worthless."""
        while True:
            placed = self._around.stream.outcome(sent.token)
            if not placed.again:
                return replace(sent, placed=placed)
            sent = replace(self._send(cut.again(sent.read)), read=sent.read)

    def _note(self, note: Callable[[ChunkResult, int], None]) -> None:
        """Tell of what is durable by now."""
        durable = self._around.stream.durable
        while self._landed and _position(self._landed[0]) <= durable:
            landed = self._landed.popleft()
            note(landed.read, landed.placed.rows if landed.placed else 0)
            hit("chunk_durable")

    def _send(self, part: ChunkRange) -> _SentChunk:
        around, leaf = self._around, part.rows.leaf if isinstance(part.rows, BlockRange) else None
        while True:
            if not around.gate.through():
                raise CopyStopped
            token = uuid4().hex
            schema = around.stream.placing.open(token, self._relation, WATERMARK_TIMEOUT)
            if schema is None or schema.state not in CAPTURED:
                raise not_copyable_error(schema)
            with around.stream.placing.closing(token), snapshot_transaction(self._conn, schema, leaf) as visibility:
                known = has_columns(self._conn, schema)
                seen = around.stream.placing.sees_all(token, visibility)
                rows, nbytes = self._read(schema, part) if seen and known else (LOG_SCHEMA.empty_table(), 0)
            if seen and known:
                break
            around.stop.wait(VISIBILITY_PAUSE) if known else self._renew()
        hit("chunk_read")
        around.stream.send(token, Chunk(schema.relation, schema.topic, rows, address=self._address))
        around.pace.spend(rows.num_rows, nbytes)
        before, self._streamed = self._streamed, around.stream.placing.streamed
        self._quiet = self._streamed == before
        return _SentChunk(token, ChunkResult.of(part, rows, quiet=self._quiet))

    def _renew(self) -> None:
        """Tell the version that the catalogue shows, which the stream will not before a row follows it."""
        stream = self._around.stream

        def made(version: TableSchema | None) -> Chunk:
            if version is None or version.state not in CAPTURED:
                raise not_copyable_error(version)
            now = published_schema(self._conn, version.oid, self._around.publication)
            seen = schema_from_catalog(version, now, stream.durable.epoch)
            return schema_chunk(replace(seen, state=version.state, reason=version.reason))

        stream.place(self._relation, made)

    def _read(self, schema: TableSchema, part: ChunkRange) -> tuple[pa.Table, int]:
        """The rows, and how many bytes of text they were."""
        conn, publication, asked = self._conn, self._around.publication, part.rows
        limit = None if part.is_smallest else (IDLE_FACTOR + 1) * self._around.limits.nbytes
        if isinstance(asked, BlockRange):
            return self._rows(schema, block_range_query(conn, schema, asked, publication), limit)
        with bounded_read(conn, schema, asked.where):
            rows, nbytes = self._rows(schema, key_range_query(conn, schema, asked, part.limit, publication), limit)
        if part.gone and asked.keys is not None:
            rows = pa.concat_tables([rows, deletion_rows(schema, missing_keys(conn, schema, asked.keys, publication))])
        return rows, nbytes

    def _rows(self, schema: TableSchema, query: Any, limit: int | None) -> tuple[pa.Table, int]:
        decoder = CopyDecoder(schema, position=Position(0), xid=0, committed_at=0, first_ordinal=0)
        mend, batches, text, held = self._around.mend(schema), list[pa.RecordBatch](), 0, 0
        for lines in copy_rows(self._conn, query, schema):
            text += len(lines)
            if (batch := decoder.feed(mend(lines))) is not None:
                batches.append(batch)
                held += batch.nbytes
                if limit is not None and held > limit:
                    raise ChunkTooLarge
        decoder.finish()
        return pa.Table.from_batches(batches, LOG_SCHEMA), text


def _position(landed: _SentChunk) -> Position:
    assert landed.placed is not None  # noqa: S101 - it landed
    return landed.placed.position
