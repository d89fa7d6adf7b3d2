"""Every type of a real server, captured by a real reader: events fit their schemas, and Postgres computes the same."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import inf, isclose, isnan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fastavro import parse_schema, schemaless_reader

from cdc.delivery.formats.avro_codec import AvroCodec
from cdc.delivery.formats.debezium import DebeziumFormat
from cdc.delivery.formats.printed_events import MessageFormat, PrintedEvents
from cdc.delivery.formats.protobuf_codec import ProtobufCodec
from cdc.delivery.formats.table_changes import TableChanges, table_changes
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.delivery.formats.changes import format_named
from tests.delivery.formats.connect_reader import connect_value
from tests.delivery.formats.test_protobuf_codec import read_protobuf
from tests.faults.capture import Captured
from tests.fixtures.postgres import fresh_database, rows_of, run_sql
from tests.postgres.samples import EXTENSIONS
from tests.postgres.test_values import COMPOSED, MADE_TYPES, literal, supported

ORACLES = {
    "smallint": "v",
    "integer": "v",
    "bigint": "v",
    "oid": "v::bigint",
    "boolean": "v",
    "date": "CASE WHEN isfinite(v) THEN v - '1970-01-01'::date END",
    "timestamp without time zone": (
        "CASE WHEN isfinite(v) AND v < '294247-01-01' THEN extract(epoch FROM v) * 1000000 END"
    ),
    "timestamp with time zone": (
        "CASE WHEN isfinite(v) AND v BETWEEN '0001-01-01' AND '9999-12-31'"
        " THEN to_char(v AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') END"
    ),
    "time without time zone": "(extract(epoch FROM v) * 1000000)::bigint",
    "numeric": "CASE WHEN v NOT IN ('NaN', 'Infinity', '-Infinity') THEN v END",
    "money": "v::numeric",
    "real": "v",
    "double precision": "v",
    "bytea": "v",
    "text": "v",
    "character varying": "v",
    "json": "v::text",
    "jsonb": "v::text",
    "uuid": "v::text",
    "bit varying": "CASE WHEN length(v) > 0 THEN v::text END",
}
"""Type -> what Postgres computes for the column v; NULL where there is nothing to compare."""
REFUSED = {
    "numeric": {"NaN", "Infinity", "-Infinity"},
    "interval": {"infinity", "-infinity", "178000000 years", "-178000000 years", "2562047788:00:54.775807"},
    "timestamp without time zone": {"294276-12-31 23:59:59.999999"},
}
"""Type -> values that Debezium cannot represent."""


@dataclass(frozen=True)
class Sampled:
    """A log with values of every type."""

    dsn: str
    tables: Sequence[TableChanges]
    """The inserts of each table, in order of their ids."""

    def changes(self, prefix: str) -> Iterator[TableChanges]:
        """Those of the tables whose name begins with the prefix."""
        return (changes for changes in self.tables if changes.schema.name.startswith(prefix))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, postgres: EmbeddedPostgres) -> Iterator[Sampled]:
    """A log with every sample of every type, in columns v of tables v0, v1, … and as arrays in tables a0, a1, …"""
    with contextmanager(fresh_database)(postgres) as dsn:
        yield Sampled(dsn, list(_inserts(_capture(tmp_path_factory.mktemp("sampled"), dsn))))


def _inserts(log: LogReader) -> Iterator[TableChanges]:
    rows = pa.Table.from_batches(list(log.rows(Position(0), log.durable or Position(0))))
    inserts = rows.filter(pc.equal(rows["op"], "c"))
    for relation, schema in log.schemas().items():
        found = inserts.filter(pc.equal(inserts["relation"], relation))
        ordered = found.sort_by([("position", "ascending"), ("ordinal", "ascending")])
        yield table_changes(schema, f"s.public.{schema.name}", ordered)


def _capture(folder: Path, dsn: str) -> LogReader:
    captured = Captured(folder, dsn)
    with connect(dsn, autocommit=True) as conn:
        available = {name for (name,) in conn.execute("SELECT name FROM pg_available_extensions").fetchall()}
        extensions = sorted(EXTENSIONS.keys() & available)
        samples = {
            **supported(dsn),
            **{kind: values for name in extensions for kind, values in EXTENSIONS[name].items()},
        }
        samples |= {kind: values for kind, values in COMPOSED.items() if kind != "nest"}
        for statement in [*(f"CREATE EXTENSION {name}" for name in extensions), *MADE_TYPES]:
            conn.execute(statement)  # type: ignore[call-overload]
        for number, kind in enumerate(samples):
            conn.execute(f"CREATE TABLE v{number} (id serial PRIMARY KEY, v {kind})")  # type: ignore[call-overload]
            conn.execute(f"CREATE TABLE a{number} (id serial PRIMARY KEY, v {kind}[])")  # type: ignore[call-overload]
        captured.copy()
        for number, (kind, values) in enumerate(samples.items()):
            for value in values:
                conn.execute(f"INSERT INTO v{number} (v) VALUES ({literal(value)})")  # type: ignore[call-overload]
            elements = ", ".join(f"{literal(value)}::{kind}" for value in values if len(value) < 10_000)
            if not kind.endswith("[]"):
                conn.execute(f"INSERT INTO a{number} (v) VALUES (ARRAY[{elements}, NULL]::{kind}[])")  # type: ignore[call-overload]
    captured.stream()
    return captured.log


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "connect": {"time": "connect", "decimal": "string", "interval": "string", "hstore": "map", "bytes": "hex"},
    "isostring": {"time": "isostring", "decimal": "double", "bytes": "base64", "transaction": True},
    "microseconds": {"time": "adaptive_time_microseconds", "bytes": "base64-url-safe"},
}


@pytest.mark.parametrize("prefix", ["v", "a"])
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_every_value_fits_the_schema_of_its_event(sampled: Sampled, options: dict[str, Any], prefix: str) -> None:
    seen = 0
    for name in ("debezium", "flat"):
        for changes in sampled.changes(prefix):
            events = format_named(name, schemas=True, **options).encode(changes)
            for key, text in zip(events.keys.to_pylist(), events.values.to_pylist(), strict=True):
                event = json.loads(text)
                connect_value(event["payload"], event["schema"])
                connect_value(json.loads(key)["payload"], json.loads(key)["schema"])
                seen += 1
            assert len(events.refused) + len(events.source) == changes.count
    assert seen > 300 or prefix == "a"


@pytest.mark.parametrize("prefix", ["v", "a"])
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_every_value_is_the_same_in_avro(sampled: Sampled, options: dict[str, Any], prefix: str) -> None:
    encoder = format_named("debezium", **options)
    assert isinstance(encoder, DebeziumFormat)
    for changes in sampled.changes(prefix):
        codec = AvroCodec(encoder.schemas(changes.schema, changes.topic)[1])
        # without logical types the reader returns bytes and numbers as they were written
        schema = parse_schema(json.loads(codec.schema_text.replace('"logicalType"', '"ignored"')))
        for text in encoder.encode(changes).values.to_pylist():
            found = schemaless_reader(BytesIO(codec.encode(json.loads(text))), schema, None)["after"]["v"]
            assert _agrees(found, json.loads(text)["after"]["v"])


@pytest.mark.parametrize("prefix", ["v", "a"])
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_every_value_can_be_written_in_protobuf(sampled: Sampled, options: dict[str, Any], prefix: str) -> None:
    encoder = format_named("debezium", **options)
    assert isinstance(encoder, DebeziumFormat)
    for changes in sampled.changes(prefix):
        codec = ProtobufCodec(encoder.schemas(changes.schema, changes.topic)[1])
        for text in encoder.encode(changes).values.to_pylist():
            found = read_protobuf(codec, codec.encode(json.loads(text)))
            value = json.loads(text)["after"]["v"]
            assert found.after.id == json.loads(text)["after"]["id"]
            if isinstance(value, bool | str | int) and not isinstance(found.after.v, float):
                shown = b64encode(found.after.v).decode() if isinstance(found.after.v, bytes) else found.after.v
                assert shown == value


def _agrees(found: Any, text: Any) -> bool:
    """Whether a value of Avro is that of JSON; floats of 32 bits are rounded."""
    if isinstance(found, bytes):
        return b64encode(found).decode() == text
    if isinstance(found, float):
        names = {inf: "Infinity", -inf: "-Infinity"}
        known = "NaN" if isnan(found) else names.get(found)
        return text == known if known else isclose(found, text, rel_tol=1e-6, abs_tol=1e-44)
    if isinstance(found, dict):
        return found.keys() == text.keys() and all(_agrees(one, text[key]) for key, one in found.items())
    if isinstance(found, list):
        items = [[one["key"], one["value"]] if isinstance(one, dict) and "key" in one else one for one in found]
        return len(items) == len(text) and all(map(_agrees, items, text))
    return bool(found == text)


def test_only_values_without_a_representation_are_refused(sampled: Sampled) -> None:
    refused: dict[str, set[str]] = {}
    for changes in sampled.changes("v"):
        texts = changes.after.columns[2].texts
        for index in format_named("debezium").encode(changes).refused:
            refused.setdefault(changes.columns[1].type_name, set()).add(texts[index].as_py())
    of_arrays = refused.pop("text[]")
    assert refused == REFUSED
    assert all(text.startswith(("{{", "[-2:-1][5:6]")) for text in of_arrays)


def test_postgres_computes_the_same_values(sampled: Sampled) -> None:
    compared = set()
    for changes in sampled.changes("v"):
        column = changes.columns[1]
        oracle = ORACLES.get(column.type_name)
        if oracle is None or (column.typmod >= 0 and column.type_name.startswith("time")):
            continue
        expected = dict(rows_of(sampled.dsn, f"SELECT id, {oracle} FROM {changes.schema.name}"))  # type: ignore[arg-type]
        events = format_named("debezium", schemas=True).encode(changes)
        for text in events.values.to_pylist():
            event = json.loads(text)
            after = connect_value(event["payload"], event["schema"])["after"]
            if (wanted := expected[after["id"]]) is not None:
                assert _same(after["v"], wanted), f"{column.type_name}: {after['v']!r} is not {wanted!r}"
                compared.add(column.type_name)
    assert compared == set(ORACLES)


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, bytes) and isinstance(wanted, str):
        return int.from_bytes(found, "little") == int(wanted, 2)
    if isinstance(found, float):
        return found == wanted or (isnan(found) and isnan(wanted))
    return bool(found == wanted)


def test_the_format_cdc_has_the_exact_texts(sampled: Sampled) -> None:
    for changes in sampled.changes("v"):
        events = format_named("cdc").encode(changes)
        assert events.refused == {}
        texts = changes.after.columns[2].texts.to_pylist()
        for text, value in zip(texts, events.values.to_pylist(), strict=True):
            found = json.loads(value)["after"]["v"]
            assert found == text or str(found) == text or {True: "t", False: "f"}[found] == text


CHANGES = (
    "INSERT INTO orders VALUES (1, 'new', repeat('x', 10))",
    "INSERT INTO orders SELECT 2, 'big', string_agg(md5(n::text), '') FROM generate_series(1, 1000) n",
    "UPDATE orders SET state = 'paid' WHERE id = 2",
    "UPDATE orders SET id = 3 WHERE id = 1",
    "DELETE FROM orders WHERE id = 3",
    "ALTER TABLE orders REPLICA IDENTITY FULL",
    "UPDATE orders SET state = 'sent' WHERE id = 2",
    "DELETE FROM orders WHERE id = 2",
    "TRUNCATE orders",
)


def test_changes_of_a_real_stream_are_those_of_debezium(tmp_path: Path, database: str) -> None:
    run_sql(database, "CREATE TABLE orders (id int PRIMARY KEY, state text NOT NULL, note text)")
    captured = Captured(tmp_path, database)
    captured.copy()
    run_sql(database, *CHANGES)  # type: ignore[arg-type]
    captured.stream()
    log = captured.log
    rows = pa.Table.from_batches(list(log.rows(Position(0), log.durable or Position(0))))
    rows = rows.sort_by([("position", "ascending"), ("ordinal", "ascending")])
    printed = PrintedEvents({}, MessageFormat.DEBEZIUM, pipeline="shop", database="db")
    found = [one for one in printed.messages(rows) if one["topic"] == "shop.public.orders"]
    big = {**found[1]["value"]["after"], "state": "paid"}
    assert len(big["note"]) == 32_000
    unavailable, key_only = "__debezium_unavailable_value", {"id": 1, "state": "", "note": None}
    assert [(one["value"] or {}).get("op") for one in found] == [*"ccud", None, *"cd", None, *"ud", None, "t"]
    assert [(one["value"]["before"], one["value"]["after"]) for one in found if one["value"]] == [
        (None, {"id": 1, "state": "new", "note": "x" * 10}),
        (None, {**big, "state": "big"}),
        (None, {**big, "note": unavailable}),
        (key_only, None),
        (None, {"id": 3, "state": "new", "note": "x" * 10}),
        ({**key_only, "id": 3}, None),
        (big, {**big, "state": "sent"}),
        ({**big, "state": "sent"}, None),
        (None, None),
    ]
    assert [one["headers"] for one in found[3:6]] == [
        {"__debezium.newkey": {"id": 3}},
        {"__debezium.newkey": {"id": 3}},
        {"__debezium.oldkey": {"id": 1}},
    ]
    assert all(one["value"]["source"]["txId"] > 0 for one in found if one["value"])
