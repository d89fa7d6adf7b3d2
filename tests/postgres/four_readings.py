"""The same rows read four ways: SELECT, COPY, and the stream through both decoders.

SELECT without a cast is the oracle: it prints the text of the type's output function. (A cast to text is another
function for some types: it turns `t` into `true` and removes the blanks of a `char(3)`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
from psycopg import sql

from cdc.log_row import LOG_SCHEMA
from cdc.lsn import Lsn
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.pgoutput.decoder_events import DecodedRows, RelationSeen
from cdc.pgoutput.message_parser import FrameBatch, parse_frame
from cdc.pgoutput.messages import CommitMessage, Keepalive
from cdc.pgoutput.reference_decoder import ReferenceDecoder
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import copy_table
from cdc.postgres.publication import ensure_publication
from cdc.postgres.replication import LargeTransactions, ReplicationStream, StreamOptions
from cdc.postgres.slot import create_slot
from cdc.postgres.sqlstate import map_errors
from cdc.postgres.tables import match_tables, read_schema, resolve_relation
from cdc.table import TableSchema
from tests.fixtures.postgres import drop_when_free
from tests.fixtures.waiting import until

Decoder = ReferenceDecoder | ColumnarDecoder
Texts = dict[str, list[tuple[bytes | None, ...]]]
"""By topic: one tuple per row, in the order of the sent columns."""


@dataclass(frozen=True, slots=True)
class Readings:
    """The same rows, read in four ways."""

    selected: Texts
    copied: Texts
    plain: Texts
    columnar: Texts

    def agree(self) -> Texts:
        """The rows, which all four ways must read alike; fails at the first row that differs."""
        for way in (self.copied, self.plain, self.columnar):
            assert way.keys() == self.selected.keys()
            for topic, rows in self.selected.items():
                assert len(way[topic]) == len(rows), topic
                for selected, row in zip(rows, way[topic], strict=True):
                    assert row == selected, topic
        return self.selected


def execute(conn: psycopg.Connection, statement: str | bytes) -> None:
    """Run one statement, which may contain bytes of any encoding."""
    with map_errors():
        conn.execute(statement.encode() if isinstance(statement, str) else statement)


@contextmanager
def capture_stream(dsn: str, pattern: str = "*.*") -> Iterator[Capture]:
    """Publish the tables that match, and stream from now on; drops slot and publication at the end."""
    name = f"readings_{uuid4().hex[:12]}"
    with connect(dsn) as conn:
        ensure_publication(conn, name, [table for _, table in match_tables(conn, [pattern])])
        with create_slot(dsn, name):
            pass
        options = StreamOptions(
            slot=name, publication=name, start=Lsn(0), status_interval=1.0, large=LargeTransactions.WHOLE
        )
        with ReplicationStream.open(dsn, options) as stream:
            yield Capture(dsn, name, stream)
        drop_when_free(conn, name)
        conn.execute(sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(name)))


class Capture:
    """A running stream, which keeps its frames, so that each decoder can decode the same ones."""

    def __init__(self, dsn: str, publication: str, stream: ReplicationStream) -> None:
        self.dsn, self.publication, self._stream = dsn, publication, stream
        self.received: list[bytes] = []
        """The result of the last call of frames()."""

    def frames(self) -> list[bytes]:
        """All frames up to the commit of a message that this call writes."""
        with connect(self.dsn) as conn:
            row = conn.execute("SELECT pg_logical_emit_message(true, 'cdc.heartbeat', '')").fetchone()
        assert row is not None
        found: list[bytes] = []
        self.received = found
        end = int(row[0].partition("/")[0], 16) << 32 | int(row[0].partition("/")[2], 16)

        def ended() -> bool:
            for frame in self._stream.receive(0.5) or ():
                found.append(frame)
                if frame[25:26] == b"C" and _commit_lsn(frame) >= end:
                    return True
            return False

        until(ended, "the end of the stream", every=0)
        return found

    def changes(self, *statements: str) -> list[dict[str, Any]]:
        """The log rows of the statements, which both decoders must decode alike; call it once per capture."""
        with connect(self.dsn) as conn:
            for statement in statements:
                execute(conn, statement)
        frames = self.frames()
        plain, columnar = self.rows(ReferenceDecoder(), frames), self.rows(ColumnarDecoder(), frames)
        assert columnar.equals(plain)
        return plain.to_pylist()

    def rows(self, decoder: Decoder, frames: Iterable[bytes]) -> pa.Table:
        """The log rows of the frames, with schemas from the catalogue."""
        found: list[pa.RecordBatch] = []
        with connect(self.dsn) as conn:
            for event in decoder.decode(FrameBatch.of(list(frames))):
                if isinstance(event, RelationSeen):
                    decoder.define(resolve_relation(conn, event.relation, None), announce=False)
                elif isinstance(event, DecodedRows):
                    found.append(event.rows)
        table = pa.Table.from_batches(found, LOG_SCHEMA)
        table.validate(full=True)
        return table


def _commit_lsn(frame: bytes) -> int:
    message = parse_frame(frame)
    assert isinstance(message, CommitMessage | Keepalive)
    return message.lsn if isinstance(message, CommitMessage) else 0


def read_four_ways(dsn: str, statements: Sequence[str | bytes], pattern: str = "*.*") -> Readings:
    """Run INSERT statements while a stream is open, then read the tables that match in all four ways."""
    with capture_stream(dsn, pattern) as capture:
        with connect(dsn) as conn:
            for statement in statements:
                execute(conn, statement)
        frames = capture.frames()
        with connect(dsn) as conn:
            oids = [oid for oid, _ in match_tables(conn, [pattern])]
            schemas = [schema for oid in oids if (schema := read_schema(conn, oid)) is not None]
            selected = {schema.topic: select_rows(conn, schema) for schema in schemas}
        with connect(dsn, autocommit=False) as conn:
            copied = {schema.topic: [_texts(schema, row) for row in _copied(conn, schema)] for schema in schemas}
        return Readings(
            selected=selected,
            copied=copied,
            plain=_streamed(schemas, capture.rows(ReferenceDecoder(), frames)),
            columnar=_streamed(schemas, capture.rows(ColumnarDecoder(), frames)),
        )


def select_rows(conn: psycopg.Connection, schema: TableSchema) -> list[tuple[bytes | None, ...]]:
    """The bytes that a SELECT without casts returns, in physical order of the rows."""
    columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in schema.sent)
    query = sql.SQL("SELECT {} FROM {}").format(columns, sql.Identifier(schema.schema, schema.name))
    result = conn.pgconn.exec_(query.as_bytes(conn))
    assert not result.error_message, result.error_message
    width = len(schema.sent)
    return [tuple(result.get_value(row, place) for place in range(width)) for row in range(result.ntuples)]


def copy_rows(dsn: str, schema: TableSchema) -> list[dict[str, Any]]:
    """The rows of an initial copy."""
    with connect(dsn, autocommit=False) as conn:
        return _copied(conn, schema)


def _copied(conn: psycopg.Connection, schema: TableSchema) -> list[dict[str, Any]]:
    decoder = CopyDecoder(schema, position=Position(1), xid=0, committed_at=0, first_ordinal=0)
    batches = [batch for chunk in copy_table(conn, schema) if (batch := decoder.feed(chunk)) is not None]
    decoder.finish()
    table = pa.Table.from_batches(batches, LOG_SCHEMA)
    table.validate(full=True)
    return table.to_pylist()


def _streamed(schemas: Sequence[TableSchema], rows: pa.Table) -> Texts:
    found: Texts = {schema.topic: [] for schema in schemas}
    known = {schema.topic: schema for schema in schemas}
    for row in rows.to_pylist():
        assert row["op"] == "c"
        found[row["topic"]].append(_texts(known[row["topic"]], row))
    return found


def _texts(schema: TableSchema, row: dict[str, Any]) -> tuple[bytes | None, ...]:
    after = dict(row["after"])
    assert after.keys() == {column.id for column in schema.sent}
    assert not row["partial"]
    values = (after[column.id] for column in schema.sent)
    return tuple(None if value is None else value.encode() for value in values)
