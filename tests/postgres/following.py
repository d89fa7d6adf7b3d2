"""Following: a session of the reader's decoding without its threads: real slot, decoder and relations, rows in hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

from cdc.capture.schema_tracker import CaptureFilter, SchemaTracker
from cdc.change import Operation
from cdc.lsn import Lsn
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.decoder_events import DdlSeen, Decoded, RelationSeen
from cdc.pgoutput.frames import FrameBatch
from cdc.postgres.connection import connect
from cdc.postgres.publication import ensure_publication, published_schema
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.postgres.slot import create_slot
from cdc.postgres.tables import match_tables
from cdc.table import TableSchema
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until

PUBLICATION = "pub"
Row = dict[str, Any]


class Following:
    """One stream from where the tables were published; reads only when it is told to."""

    def __init__(self, dsn: str, stream: ReplicationStream, relations: SchemaTracker) -> None:
        self.dsn, self.relations = dsn, relations
        self.rows: list[Row] = []
        self.versions: list[TableSchema] = []
        """Of the `s` rows so far, in their order."""
        self._stream = stream
        self._decoder = ColumnarDecoder()
        self._marks = 0

    def run(self, *statements: LiteralString) -> None:
        """Statements at the source, each in a transaction of its own; nothing is read."""
        run_sql(self.dsn, *statements)

    def catch_up(self) -> list[Row]:
        """Read all that happened so far; the new rows, those of `s` among them."""
        self._marks += 1
        mark = f"mark {self._marks}"
        with connect(self.dsn) as conn:
            conn.execute("SELECT pg_logical_emit_message(true, 'mark', %s)", [mark])
        seen = len(self.rows)

        def marked() -> bool:
            if (frames := self._stream.receive(0.2)) is not None:
                self._decode(frames)
            return any(row["payload"] == mark.encode() for row in self.rows[seen:])

        until(marked, lambda: f"more than {self.rows[seen:]!r}", every=0.0)
        return self.rows[seen:]

    def look(self) -> list[TableSchema]:
        """Let one whole look at the catalogue pass, and write what it found; the versions it gave."""
        wanted, found = self.relations.checks + 2, list[TableSchema]()  # the first may have begun before the call

        def looked() -> bool:
            found.extend(self.relations.detect_drift())
            return self.relations.checks >= wanted

        until(looked, "the end of a look", every=0.0)
        for schema in found:
            self._decoder.announce(schema)
        self.catch_up()
        return found

    @property
    def latest(self) -> TableSchema:
        """The version of the last `s` row."""
        return self.versions[-1]

    def _decode(self, frames: FrameBatch) -> None:
        for event in self._decoder.decode(frames):
            if isinstance(event, RelationSeen):
                seen = self.relations.resolve_relation(event.relation, event.position)
                assert seen is not None
                schema, announce = seen
                self._decoder.define(schema, announce=announce)
            elif isinstance(event, DdlSeen):
                for schema in self.relations.apply_ddl(event.content):
                    self._decoder.announce(schema)
            elif isinstance(event, Decoded):
                rows = event.rows.to_pylist()
                self.rows += rows
                self.versions += [
                    TableSchema.from_json(row["payload"]) for row in rows if row["op"] == Operation.SCHEMA.value
                ]


@contextmanager
def following(dsn: str, pattern: str = "public.*") -> Iterator[Following]:
    """Publish the tables that exist, and follow them from here."""
    slot = dsn.rpartition("/")[2]
    with connect(dsn) as conn:
        ensure_publication(conn, PUBLICATION, [name for _, name in match_tables(conn, [pattern])])
        with create_slot(dsn, slot):
            pass
        found = [published_schema(conn, oid, PUBLICATION) for oid, _ in match_tables(conn, [pattern])]
    known = {schema.relation: schema for schema in found if schema is not None}
    relations = SchemaTracker(CaptureFilter(dsn=dsn, publication=PUBLICATION), known, 0, check_every=0.0)
    with ReplicationStream.open(dsn, StreamOptions(slot=slot, publication=PUBLICATION, start=Lsn(0))) as stream:
        yield Following(dsn, stream, relations)
