"""Databases of other encodings: the server converts their text; for SQL_ASCII the policy of the definition applies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from cdc.capture.decode_stage import DecodeStage, ResumePoint, StreamObservers
from cdc.capture.initial_snapshot import ensure_initial_snapshot
from cdc.capture.schema_tracker import CaptureFilter, SchemaTracker
from cdc.capture.settings import SourceSettings
from cdc.capture.spool import Spool
from cdc.config.source import Undecodable
from cdc.errors import UndecodableValue, UndecodableWal
from cdc.log.disk_format import LogIdentity
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.logical_message import LogicalMessage
from cdc.lsn import Lsn
from cdc.metrics import Metrics
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.pgoutput.decoder_events import DecodedRows
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.reference_decoder import ReferenceDecoder
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.copy_in_snapshot import copy_table
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.replication import ReplicationStream, StreamOptions, identify_system
from cdc.postgres.sql_ascii import CopyTextRepair, FrameTextRepair, copy_text_repair, frame_text_repair, unchanged
from cdc.postgres.tables import match_tables, read_schema
from tests.fixtures.postgres import VERSIONS, drop_when_free, run_sql
from tests.fixtures.waiting import until
from tests.postgres.four_readings import capture_stream, read_four_ways


@pytest.fixture(params=("postgres", *(pytest.param(name, marks=pytest.mark.slow) for name in VERSIONS[1:])))
def server(request: pytest.FixtureRequest) -> EmbeddedPostgres:
    """A server of the newest version; of all of them among the slow tests."""
    found: EmbeddedPostgres = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def encoded(server: EmbeddedPostgres, encoding: str) -> Iterator[str]:
    """DSN of a fresh database of that encoding."""
    name = sql.Identifier(f"test_{encoding.lower()}_{uuid4().hex[:8]}")
    template = "CREATE DATABASE {} TEMPLATE template0 ENCODING {} LOCALE 'C' LOCALE_PROVIDER libc"
    with connect(server.dsn()) as conn:
        conn.execute(sql.SQL(template).format(name, sql.Literal(encoding)))
        yield server.dsn(name.as_string(None).strip('"'))
        conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("UTF8", "é€漢字\U0001f600"),
        ("LATIN1", "éßÿ\u00a0\u0080"),
        ("EUC_JP", "日本語 ｶﾀｶﾅ 漢字 ～"),
        ("WIN1252", "€ “é” ž"),
    ],
)
def test_a_declared_encoding_is_converted_names_included(encoded: str, encoding: str, text: str):
    letter = text[0]
    run_sql(encoded, f'CREATE TABLE "t{letter}" ("c{letter}" text, plain text[])')  # type: ignore[arg-type]
    agreed = read_four_ways(encoded, [f"INSERT INTO \"t{letter}\" VALUES ('{text}\\t', ARRAY['{text}', NULL])"]).agree()
    assert agreed == {f"public.t{letter}": [(f"{text}\\t".encode(), agreed[f"public.t{letter}"][0][1])]}
    assert text.encode() in (agreed[f"public.t{letter}"][0][1] or b"")


@pytest.mark.parametrize("encoding", ["EUC_JP"])
def test_a_character_that_utf8_does_not_have_is_an_error(encoded: str, encoding: str):
    run_sql(encoded, "CREATE TABLE t (v text)")
    with capture_stream(encoded) as capture:
        run_sql(encoded, r"SET client_encoding TO EUC_JP; INSERT INTO t VALUES (E'\xa9\xa9')")
        with pytest.raises(UndecodableWal, match="22P05"):
            capture.frames()


RAW = r"'k', E'caf\xe9\t', E'\xff\\x', 'b\c', NULL, 'base64:'"
BYTES = (b"k", b"caf\xe9\t", b"\xff\\x", b"b\\c", None, b"base64:")
TOLD = {
    Undecodable.REPLACE: ["k", "caf\ufffd\t", "\ufffd\\x", "b\\c", None, "base64:"],
    Undecodable.BASE64: ["k", "base64:Y2Fm6Qk=", "base64:/1x4", "b\\c", None, "base64:YmFzZTY0Og=="],
}
TABLE = "CREATE TABLE t (k text PRIMARY KEY, a text, b varchar, c text, d text, e text)"


def insert_raw(dsn: str) -> None:
    """A row with bytes that are of no encoding."""
    with connect(dsn) as conn:
        conn.execute("SET client_encoding TO SQL_ASCII")
        conn.execute(f"INSERT INTO t VALUES ({RAW})".encode())


@pytest.mark.parametrize("encoding", ["SQL_ASCII"])
@pytest.mark.parametrize("policy", TOLD)
def test_copy_and_stream_decode_undecodable_text_alike(encoded: str, encoding: str, policy: Undecodable):
    run_sql(encoded, TABLE)
    with capture_stream(encoded) as capture:
        insert_raw(encoded)
        frames = capture.frames()
        for decoder in (ReferenceDecoder(), ColumnarDecoder()):
            mended = FrameTextRepair(policy, Position(0))(FrameBatch.of(frames))
            assert [value for _, value in capture.rows(decoder, mended).to_pylist()[0]["after"]] == TOLD[policy]
    with connect(encoded, autocommit=False) as conn:
        schema = read_schema(conn, match_tables(conn, ["*.*"])[0][0])
        assert schema is not None
        copy = CopyDecoder(schema, position=Position(1), xid=0, committed_at=0, first_ordinal=0)
        batch = copy.feed(CopyTextRepair(policy, schema)(b"".join(copy_table(conn, schema))))
        assert batch is not None
        assert [value for _, value in batch.to_pylist()[0]["after"]] == TOLD[policy]
        # the session that copied reads text again
        assert conn.execute("SELECT 'é'").fetchone() == ("é",)


@pytest.mark.parametrize("encoding", ["SQL_ASCII"])
def test_undecodable_text_is_refused_by_default_and_named(encoded: str, encoding: str):
    run_sql(encoded, TABLE)
    with capture_stream(encoded) as capture:
        insert_raw(encoded)
        batch = FrameBatch.of(capture.frames())
        with pytest.raises(
            UndecodableValue, match=r"column 'a' of table 'public.t' .* at byte 3, in the transaction at"
        ):
            FrameTextRepair(Undecodable.FAIL, Position(0))(batch)
    with connect(encoded) as conn:
        schema = read_schema(conn, match_tables(conn, ["*.*"])[0][0])
        assert schema is not None
        with pytest.raises(UndecodableValue, match=r"column 'a' of table 'public.t' .* in row 0 of the copy"):
            CopyTextRepair(Undecodable.FAIL, schema)(b"".join(copy_table(conn, schema)))


@pytest.mark.parametrize(
    ("encoding", "policy", "expected"),
    [
        ("SQL_ASCII", Undecodable.BASE64, "base64:Y2Fm6Q=="),
        ("SQL_ASCII", Undecodable.REPLACE, "caf\ufffd"),
        ("LATIN1", Undecodable.FAIL, "café"),
    ],
)
def test_the_prefix_of_a_message_is_utf8_in_every_encoding(
    encoded: str, encoding: str, policy: Undecodable, expected: str
):
    with capture_stream(encoded) as capture:
        with connect(encoded) as conn:
            conn.execute(sql.SQL("SET client_encoding TO {}").format(sql.Literal(encoding)))
            conn.execute(rb"SELECT pg_logical_emit_message(true, E'caf\xe9', '\xff'::bytea)")
        batch = frame_text_repair(encoded, policy, Position(0))(FrameBatch.of(capture.frames()))
        for decoder in (ReferenceDecoder(), ColumnarDecoder()):
            (row,) = [row for row in capture.rows(decoder, batch).to_pylist() if row["payload"] == b"\xff"]
            assert LogicalMessage.from_row(row).prefix == expected


@pytest.mark.parametrize("encoding", ["SQL_ASCII"])
def test_utf8_in_a_database_without_encoding_is_exact(encoded: str, encoding: str):
    run_sql(encoded, "CREATE TABLE t (v text)")
    agreed = read_four_ways(encoded, ["INSERT INTO t VALUES ('é€漢字\U0001f600')"]).agree()
    assert agreed == {"public.t": [("é€漢字\U0001f600".encode(),)]}


@pytest.mark.parametrize("encoding", ["SQL_ASCII"])
def test_a_session_that_reads_no_values_is_refused_undecodable_text(encoded: str, encoding: str):
    # the reason why sessions that read values ask for the bytes as they are
    run_sql(encoded, TABLE)
    insert_raw(encoded)
    with connect(encoded) as conn, pytest.raises(psycopg.Error, match="invalid byte sequence"):
        conn.execute("SELECT a FROM t")


def source_of(dsn: str, policy: Undecodable) -> SourceSettings:
    """A source of all tables of the database; its slot goes with the database."""
    name = "s_" + dsn.rpartition("/")[2]
    return SourceSettings(
        pipeline="p", dsn=dsn, slot=name, publication="p", patterns=["*"], exclude=[], undecodable=policy
    )


@contextmanager
def log_of(source: SourceSettings, root: Path) -> Iterator[LogWriter]:
    """An empty log of the source; the slot goes afterwards."""
    identity = identify_system(source.dsn)
    log = LogIdentity(system_id=identity.system_id, database=identity.database)
    try:
        yield LogWriter.open(root, log, SegmentLimits(size=1 << 20, age=3600.0))
    finally:
        with connect(source.dsn) as conn:
            drop_when_free(conn, source.slot)


@pytest.mark.parametrize("encoding", ["SQL_ASCII"])
@pytest.mark.parametrize("policy", TOLD)
def test_the_policy_applies_to_the_first_copy_and_to_the_stream(
    encoded: str, encoding: str, policy: Undecodable, tmp_path: Path
):
    run_sql(encoded, TABLE)
    insert_raw(encoded)
    source, told = source_of(encoded, policy), TOLD[policy]
    with log_of(source, tmp_path) as writer:
        ensure_initial_snapshot(source, tmp_path, writer, Metrics())
        copied = [row for row in logged(tmp_path) if row["op"] == "r"]
        assert [[value for _, value in row["after"]] for row in copied] == [told]
        after = writer.durable
        assert after is not None
        options = StreamOptions(slot=source.slot, publication=source.publication, start=Lsn(0))
        with ReplicationStream.open(encoded, options) as stream:
            run_sql(encoded, "UPDATE t SET k = 'new'")
            relations = SchemaTracker(
                CaptureFilter(dsn=encoded, publication=source.publication), LogReader(tmp_path).schemas(), 0
            )
            repair = frame_text_repair(encoded, policy, after)
            decoding = DecodeStage(Spool(tmp_path), relations, ResumePoint(after), StreamObservers(), repair)
            found = [row for row in streamed(stream, decoding, 2) if row["op"] == "u"]
        assert [value for _, value in found[0]["after"]] == ["new", *told[1:]]
        decoding.close()


def logged(root: Path) -> list[dict[str, Any]]:
    """Every row of the log."""
    log = LogReader(root)
    assert log.durable is not None
    return [row for batch in log.rows(Position(0), log.durable) for row in batch.to_pylist()]


def streamed(stream: ReplicationStream, decoding: DecodeStage, count: int) -> list[dict[str, Any]]:
    """At least so many rows."""
    found: list[dict[str, Any]] = []

    def enough() -> bool:
        if (frames := stream.receive(0.5)) is not None:
            items = [item for item in decoding.rows(frames) if isinstance(item, DecodedRows)]
            found.extend(row for item in items for row in item.rows.to_pylist())
        return len(found) >= count

    until(enough, lambda: f"{count} rows, got {found}", every=0)
    return found


@pytest.mark.parametrize("encoding", ["SQL_ASCII"])
def test_a_refused_value_stops_the_first_copy_and_leaves_the_log_empty(encoded: str, encoding: str, tmp_path: Path):
    run_sql(encoded, TABLE)
    insert_raw(encoded)
    source = source_of(encoded, Undecodable.FAIL)
    with log_of(source, tmp_path) as writer:
        with pytest.raises(UndecodableValue, match=r"column 'a' of table 'public.t' .* in row 0 of the copy"):
            ensure_initial_snapshot(source, tmp_path, writer, Metrics())
        assert LogReader(tmp_path).durable is None


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1"])
def test_a_database_with_an_encoding_is_not_looked_at(encoded: str, encoding: str):
    assert frame_text_repair(encoded, Undecodable.BASE64, Position(0)) is unchanged
    with connect(encoded) as conn:
        run_sql(encoded, "CREATE TABLE t (v text)")
        schema = read_schema(conn, match_tables(conn, ["*.*"])[0][0])
    assert schema is not None
    assert copy_text_repair(encoded, Undecodable.BASE64)(schema) is unchanged
