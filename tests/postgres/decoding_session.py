"""DecodingSession: the reader's decoding without its threads, with a real slot, decoder and schema tracker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

from cdc.capture.schema_tracker import CaptureFilter, SchemaTracker
from cdc.log_row import Operation
from cdc.lsn import Lsn
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.decoder_events import DdlSeen, DecodedRows, RelationSeen
from cdc.pgoutput.message_parser import FrameBatch
from cdc.postgres.connection import connect
from cdc.postgres.logical_messages import emit_message
from cdc.postgres.publication import ensure_publication, published_schema
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.postgres.slot import create_slot
from cdc.postgres.tables import match_tables
from cdc.table import TableSchema
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until

PUBLICATION = "pub"
Row = dict[str, Any]


class DecodingSession:
    """One stream from the publication of the tables on; it reads only in catch_up and check_catalog."""

    def __init__(self, dsn: str, stream: ReplicationStream, relations: SchemaTracker) -> None:
        self.dsn, self.relations = dsn, relations
        self.rows: list[Row] = []
        self.versions: list[TableSchema] = []
        """Versions in the `s` rows so far, in their order."""
        self._stream = stream
        self._decoder = ColumnarDecoder()
        self._marks = 0

    def run(self, *statements: LiteralString) -> None:
        """Run statements at the source, each in its own transaction, without reading the stream."""
        run_sql(self.dsn, *statements)

    def catch_up(self) -> list[Row]:
        """Read the stream up to now; returns the new rows, including `s` rows."""
        self._marks += 1
        mark = f"mark {self._marks}"
        with connect(self.dsn) as conn:
            emit_message(conn, "mark", mark)
        seen = len(self.rows)

        def marked() -> bool:
            if (frames := self._stream.receive(0.2)) is not None:
                self._decode(frames)
            return any(row["payload"] == mark.encode() for row in self.rows[seen:])

        until(marked, lambda: f"more than {self.rows[seen:]!r}", every=0.0)
        return self.rows[seen:]

    def check_catalog(self) -> list[TableSchema]:
        """Wait for one whole check of the catalogue, and announce the versions that it found; returns them."""
        enough, found = self.relations.checks + 2, list[TableSchema]()  # the first may have begun before the call

        def is_checked() -> bool:
            found.extend(self.relations.detect_drift())
            return self.relations.checks >= enough

        until(is_checked, "the end of a check of the catalogue", every=0.0)
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
                seen = self.relations.resolve_relation(event)
                assert seen is not None
                schema, announce = seen
                self._decoder.define(schema, announce=announce)
            elif isinstance(event, DdlSeen):
                for schema in self.relations.apply_ddl(event.content):
                    self._decoder.announce(schema)
            elif isinstance(event, DecodedRows):
                rows = event.rows.to_pylist()
                self.rows += rows
                self.versions += [
                    TableSchema.from_json(row["payload"]) for row in rows if row["op"] == Operation.SCHEMA.value
                ]


def within(dsn: str, schema: str) -> str:
    """The DSN of sessions that make and find their tables in that schema."""
    return f"{dsn}?options=-c%20search_path%3D{schema}"


@contextmanager
def decoding_session(dsn: str, pattern: str = "public.*") -> Iterator[DecodingSession]:
    """Publish the tables that match, and stream their changes from now on."""
    slot = dsn.rpartition("/")[2]
    with connect(dsn) as conn:
        ensure_publication(conn, PUBLICATION, [name for _, name in match_tables(conn, [pattern])])
        with create_slot(dsn, slot):
            pass
        found = [published_schema(conn, oid, PUBLICATION) for oid, _ in match_tables(conn, [pattern])]
    known = {schema.relation: schema for schema in found if schema is not None}
    relations = SchemaTracker(CaptureFilter(dsn=dsn, publication=PUBLICATION), known, 0, check_every=0.0)
    with ReplicationStream.open(dsn, StreamOptions(slot=slot, publication=PUBLICATION, start=Lsn(0))) as stream:
        try:
            yield DecodingSession(dsn, stream, relations)
        finally:
            relations.close()
