"""Backfill: rows of a table read in chunks and placed into the stream, while it runs.

A backfill can be a range of keys, what a predicate says, or the whole table; for every sink or for one. A **resync** is
the whole table between a new version of its schema and a `g`: what vanished at the source while nobody watched vanishes
from every sink. Progress is recorded once the rows are durable, so a killed reader reads again what was on its way
and no more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa

from cdc import metrics
from cdc.change import LOG_SCHEMA, WATERMARK_PREFIX
from cdc.errors import ConfigError, SnapshotVoid
from cdc.failpoint import hit
from cdc.mending import MendLines
from cdc.pgoutput.copy_text import CopyDecoder
from cdc.position import Position
from cdc.postgres.chunk import Bounds, check_predicate, chunk_query, estimate, snapshot
from cdc.postgres.copy import copy_rows
from cdc.postgres.heartbeat import emit
from cdc.postgres.tables import read_schema
from cdc.snapshot.placing import Chunk, Placed, Placing
from cdc.snapshot.work import Request, TableWork, Work
from cdc.table import TableSchema, TableState

CHUNK_ROWS: Final = 50_000
CHUNK_BYTES: Final = 32 * 1024 * 1024
FIRST_ROWS: Final = 5_000
"""Rows of the first chunk, which tells how wide rows are."""
AHEAD: Final = 4
"""Chunks on their way to the log while the next is read."""
PATIENCE: Final = 30.0
"""Seconds for a watermark to come back; a large transaction before it can hold it up, then the chunk is read again."""
_ALL: Final = 1 << 31
HIDDEN_PAUSE: Final = 0.05
"""Seconds before another snapshot when one does not see what the stream has brought already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a backfill works with."""

    pipeline: str
    conn: Any
    """For chunks; autocommit."""
    telling: Any
    """For watermarks; autocommit."""
    publication: str
    placing: Placing
    figures: metrics.Figures
    mend: MendLines
    may_go_on: Callable[[], bool]
    """Asked between chunks; waits while the work is paused, False when it is to end."""
    record: Callable[[Work], None]
    stop: Event


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """A chunk whose watermark was sent."""

    token: str
    bounds: Bounds
    last: tuple[str, ...] | None
    """Its last key, behind which the next begins; None for the table's last chunk."""
    end: tuple[str, ...] | None
    """Its last key, None if it has no rows."""
    width: float
    position: Position = Position(0)  # noqa: RUF009 - an int
    rows: int = 0
    """Placed."""


class Stopped(Exception):
    """It was cancelled, or the reader stops."""


class Backfill:
    """One request on its way."""

    def __init__(self, request: Request, work: Work, around: Surroundings) -> None:
        self._request, self._work, self._around = request, work, around

    def run(self, tables: list[TableSchema]) -> None:
        """Read and place everything that is not done yet.

        Raises Stopped when it is not to go on, SnapshotVoid and source errors that may go by themselves, and
        ConfigError for what a person has to change. Can be run again with the same work.
        """
        for schema in tables:
            if self._request.where is not None:
                check_predicate(self._around.conn, schema, self._request.where)
            self._work.tables.setdefault(schema.topic, TableWork())
        self._work.state = "snapshotting"
        self._around.record(self._work)
        for schema in tables:
            done = self._work.tables[schema.topic]
            if done.state != "done":
                self._table(schema, done)
        self._work.state = "done"
        self._around.record(self._work)

    def _table(self, schema: TableSchema, done: TableWork) -> None:
        done.state, done.estimate = "snapshotting", estimate(self._around.conn, schema.oid)
        began = time.monotonic() - done.seconds
        if self._request.resync and done.began is None:
            schema = self._begin(schema)
            done.began = int(self._place(Chunk(schema.relation, schema.topic, _nothing(), schema=schema)).position)
            self._around.record(self._work)
        self._chunks(schema, done, began)
        if done.began is not None:
            end = Chunk(schema.relation, schema.topic, _nothing(), generation=Position(done.began))
            self._place(end)
        done.state = "done"
        self._around.record(self._work)

    def _begin(self, schema: TableSchema) -> TableSchema:
        """The version that a resync begins with: the table as it is now."""
        now = read_schema(self._around.conn, schema.oid, publication=self._around.publication)
        if now is None:
            raise ConfigError(f"{schema.topic!r} is no longer at the source")
        if schema.relation == schema.oid:
            return now
        if [(c.name, c.type_oid) for c in now.sent] != [(c.name, c.type_oid) for c in schema.sent]:
            raise ConfigError(
                f"{schema.topic!r} has other columns than the log knows, in a later epoch than its first",
                remedy="cdc slots recover --new-epoch",
            )
        return replace(schema, state=TableState.LIVE, reason=None, standing=now.standing)

    def _chunks(self, schema: TableSchema, done: TableWork, began: float) -> None:
        """Read and place all that is behind the last key; AHEAD chunks are on their way while the next is read."""
        request, waiting, landed = self._request, deque[_OnItsWay](), deque[_OnItsWay]()
        bounds: Bounds | None = Bounds(_key(done.after), request.first, request.last, request.where)
        width = 0.0
        while bounds is not None or waiting:
            if bounds is not None and len(waiting) < AHEAD:
                limit = max(1, min(CHUNK_ROWS, int(CHUNK_BYTES / width))) if width else FIRST_ROWS
                sent = self._send_chunk(schema.relation, bounds, limit)
                waiting.append(sent)
                width = sent.width or width
                bounds = None if sent.last is None else replace(bounds, after=sent.last)
                continue
            landed.append(self._landed(schema.relation, waiting.popleft()))
            self._note(schema, landed, done, time.monotonic() - began)
            self._slow_down(done, began)
        while landed:
            self._durable(landed[0].position)
            self._note(schema, landed, done, time.monotonic() - began)

    def _landed(self, relation: int, sent: _OnItsWay) -> _OnItsWay:
        """The chunk once it was placed, after another read where the first was worthless."""
        while True:
            placed = self._around.placing.outcome(sent.token, PATIENCE)
            if not placed.again:
                return replace(sent, position=placed.position, rows=placed.rows)
            # the same rows, however many there are by now
            again = replace(sent.bounds, last=sent.last or sent.bounds.last)
            sent = replace(self._send_chunk(relation, again, _ALL), last=sent.last)

    def _note(self, schema: TableSchema, landed: deque[_OnItsWay], done: TableWork, seconds: float) -> None:
        """Record what is durable."""
        durable, rows = self._position(), 0
        while landed and landed[0].position <= durable:
            chunk = landed.popleft()
            done.after = list(chunk.end) if chunk.end is not None else done.after
            rows += chunk.rows
        if rows or not landed:
            done.rows, done.seconds = done.rows + rows, seconds
            self._around.figures.add(metrics.SNAPSHOT_ROWS, rows, self._around.pipeline, schema.topic)
            self._around.record(self._work)
            hit("chunk_durable")

    def _send_chunk(self, relation: int, bounds: Bounds, limit: int) -> _OnItsWay:
        while True:
            self._go_on()
            token = uuid4().hex
            schema = self._around.placing.open(token, relation, PATIENCE)
            if schema.state is not TableState.LIVE:
                raise ConfigError(f"{schema.topic!r} became {schema.state.value}: {schema.reason}")
            with snapshot(self._around.conn, schema) as visibility:
                seen = self._around.placing.sees_all(token, visibility)
                rows = self._read(schema, bounds, limit) if seen else _nothing()
            if seen:
                break
            self._around.stop.wait(HIDDEN_PAUSE)
        hit("chunk_read")
        self._send(token, Chunk(schema.relation, schema.topic, rows, address=self._request.sink))
        end = _key(rows["key"][-1].as_py()) if rows.num_rows else None
        width = rows.nbytes / rows.num_rows if rows.num_rows else 0.0
        return _OnItsWay(token, bounds, end if rows.num_rows == limit else None, end, width)

    def _read(self, schema: TableSchema, bounds: Bounds, limit: int) -> pa.Table:
        conn = self._around.conn
        decoder = CopyDecoder(schema, position=Position(0), xid=0, committed_at=0, first_ordinal=0)
        lines = map(
            self._around.mend(schema),
            copy_rows(conn, chunk_query(conn, schema, bounds, limit, self._around.publication)),
        )
        batches = [batch for chunk in lines if (batch := decoder.feed(chunk)) is not None]
        decoder.finish()
        return pa.Table.from_batches(batches, LOG_SCHEMA)

    def _place(self, chunk: Chunk) -> Placed:
        """Place a chunk without rows, and wait until it is durable."""
        self._go_on()
        token = uuid4().hex
        self._around.placing.open(token, chunk.relation, PATIENCE)
        self._send(token, chunk)
        placed = self._around.placing.outcome(token, PATIENCE)
        self._durable(placed.position)
        return placed

    def _send(self, token: str, chunk: Chunk) -> None:
        self._around.placing.offer(token, chunk)
        emit(self._around.telling, WATERMARK_PREFIX, token)

    def _position(self) -> float:
        return self._around.figures.value(metrics.LOG_POSITION, self._around.pipeline) or 0.0

    def _durable(self, position: Position) -> None:
        """Wait for the log to hold it."""
        deadline = time.monotonic() + PATIENCE
        while self._position() < position:
            if time.monotonic() > deadline or self._around.stop.wait(0.02):
                raise SnapshotVoid("the log did not take the chunk")

    def _go_on(self) -> None:
        if not self._around.may_go_on():
            raise Stopped

    def _slow_down(self, done: TableWork, began: float) -> None:
        if self._request.rate:
            self._around.stop.wait(max(0.0, done.rows / self._request.rate - (time.monotonic() - began)))


def _key(values: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def _nothing() -> pa.Table:
    return LOG_SCHEMA.empty_table()
