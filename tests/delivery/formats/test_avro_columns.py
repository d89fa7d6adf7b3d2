"""Avro of whole columns: the same bytes as AvroCodec writes, value by value."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from cdc.delivery.formats.avro_codec import AvroCodec
from cdc.delivery.formats.avro_columns import avro_columns
from cdc.delivery.formats.connect_schema import ConnectSchema, optional, scalar, struct
from cdc.delivery.formats.registry_format import TypedFormat, parse_json
from tests.delivery.formats.changes import ID, TOPIC, changes_of, column, format_named, log_row, schema_with

SCHEMA = schema_with(
    ID,
    column("big", 20, "bigint", not_null=True, default="7"),
    column("defaulted", 23, "integer", default="5"),
    column("small", 21, "smallint"),
    column("price", 1700, "numeric", typmod=(10 << 16 | 2) + 4),
    column("note"),
    column("flag", 16, "boolean"),
    column("at", 1184, "timestamp with time zone"),
    column("day", 1082, "date"),
    column("ratio", 701, "double precision"),
    column("part", 700, "real"),
    column("raw", 17, "bytea"),
)
TEXTS = ["", "a", "ü ✓ \U0001f600", '"\\\n\x01', "x" * 300, "null"]


def value_of(schema: ConnectSchema, value: Any) -> tuple[pa.Array | None, bytes]:
    """One value by both ways."""
    text = json.dumps(value)
    return avro_columns(pa.array([text]), schema, b"S"), b"S" + AvroCodec(schema).encode(json.loads(text))


def random_row(random: Random) -> dict[int, str | None]:
    whole = [str(random.choice((0, 1, -1, 63, 64, -64, -65, 2**31 - 1, -(2**31), random.randint(-999, 999))))]
    row: dict[int, str | None] = {
        2: str(random.choice((0, 2**63 - 1, -(2**63), random.randint(-(2**40), 2**40)))),
        3: whole[0],
        4: str(random.randint(-32768, 32767)),
        5: f"{random.randint(-99999, 99999)}.{random.randint(0, 99):02}",
        6: random.choice(TEXTS),
        7: random.choice("tf"),
        8: f"20{random.randint(10, 99)}-01-31 12:30:00.{random.randint(0, 999_999):06}+00",
        9: f"{random.randint(1000, 2999)}-02-28",
        10: repr(random.uniform(-1e300, 1e300)),
        11: random.choice(("0.1", "-0", "3e+38", "1e-40")),
        12: "\\x" + random.randbytes(random.randint(0, 20)).hex(),
    }
    return {number: None if number > 2 and random.random() < 0.2 else text for number, text in row.items()}


@pytest.mark.parametrize("name", ["debezium", "flat"])
@pytest.mark.parametrize("seed", range(4))
def test_random_rows_have_the_bytes_that_each_value_has(name: str, seed: int) -> None:
    random = Random(seed)
    rows = []
    for number in range(60):
        new, old = {1: str(number), **random_row(random)}, {1: str(number), **random_row(random)}
        operation = random.choice("cud")
        images = {"c": {"after": new}, "u": {"before": old, "after": new}, "d": {"before": old}}[operation]
        rows.append(log_row(operation, number, key=[str(number)], **images))
    made = format_named(name, tombstones=False, transaction=True)
    assert isinstance(made, TypedFormat)
    events = made.encode(changes_of(SCHEMA, *rows))
    for texts, schema in zip((events.keys, events.values), made.schemas(SCHEMA, TOPIC), strict=True):
        found, codec = avro_columns(texts, schema, b"S"), AvroCodec(schema)

        assert found is not None
        assert found.to_pylist() == [b"S" + codec.encode(parse_json(text)) for text in texts.to_pylist()]


@pytest.mark.parametrize("number", [0, 1, -1, 63, 64, -64, -65, 8191, 8192, 2**63 - 1, -(2**63)])
def test_integers_of_every_length(number: int) -> None:
    found, expected = value_of(struct("a.B", (("n", scalar("int64")),)), {"n": number})

    assert found is not None
    assert found.to_pylist() == [expected]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (ConnectSchema(type="array", items=scalar("string")), ["a"]),
        (ConnectSchema(type="map", keys=scalar("string"), items=optional("string")), {"a": None}),
        (scalar("double"), "NaN"),
        (optional("float"), "Infinity"),
    ],
)
def test_what_the_columns_cannot_represent_is_left_to_the_codec(field: ConnectSchema, value: Any) -> None:
    found, _ = value_of(struct("a.B", (("n", field),)), {"n": value})

    assert found is None


def test_a_missing_required_value_is_left_to_the_codec_which_refuses_it() -> None:
    inner = struct("a.C", (("n", scalar("int32")),))
    for schema, value in (
        (struct("a.B", (("n", scalar("string")),)), {"n": None}),
        (struct("a.B", (("c", inner),)), {"c": None}),
    ):
        assert avro_columns(pa.array([json.dumps(value)]), schema, b"S") is None


def test_a_null_struct_is_its_branch() -> None:
    inner = struct("a.C", (("n", scalar("int32")), ("s", optional("string")))).as_optional()
    schema = struct("a.B", (("c", inner), ("d", inner)))
    texts = ['{"c": null, "d": {"n": 3, "s": null}}', '{"c": {"n": -7, "s": "x"}, "d": null}']
    found, codec = avro_columns(pa.array(texts), schema, b""), AvroCodec(schema)

    assert found is not None
    assert found.to_pylist() == [codec.encode(json.loads(text)) for text in texts]
