"""Avro: schemas of the same types as in JSON, and values that a reader gets back."""

from __future__ import annotations

import json
from base64 import b64decode
from decimal import Decimal
from io import BytesIO
from typing import Any

import pytest
from fastavro import parse_schema, schemaless_reader

from cdc.delivery.formats.avro_codec import AvroCodec, avro_name
from cdc.delivery.formats.connect_schema import ConnectSchema, logical, optional, scalar, struct


def _read(codec: AvroCodec, value: Any) -> Any:
    """What a reader of Avro gets for a value that was parsed from JSON."""
    return schemaless_reader(BytesIO(codec.encode(value)), parse_schema(json.loads(codec.schema_text)), None)


def _of(schema: ConnectSchema) -> AvroCodec:
    return AvroCodec(struct("shop.orders.Value", (("value", schema),)))


DECIMAL = logical("bytes", "org.apache.kafka.connect.data.Decimal", scale="2")


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (scalar("int16"), 7, 7),
        (optional("int64"), None, None),
        (optional("int64"), 1 << 62, 1 << 62),
        (scalar("boolean"), True, True),
        (scalar("double"), "NaN", "nan"),
        (scalar("double"), "-Infinity", float("-inf")),
        (scalar("bytes"), "AQID", b"\x01\x02\x03"),
        (DECIMAL, "AN4=", Decimal("2.22")),
        (DECIMAL.as_optional(), None, None),
        (logical("string", "io.debezium.data.Json"), "{}", "{}"),
        (ConnectSchema(type="array", items=optional("bytes")), ["AQ==", None], [b"\x01", None]),
        (ConnectSchema(type="map", keys=scalar("string"), items=optional("string")), {"a": None}, {"a": None}),
        (
            ConnectSchema(type="map", keys=scalar("int16"), items=scalar("double")),
            [[1, 2.5]],
            [{"key": 1, "value": 2.5}],
        ),
        (struct("p.Point", (("x", scalar("double")), ("wkb", optional("bytes")))), {"x": 1, "wkb": "AQ=="},
         {"x": 1.0, "wkb": b"\x01"}),
    ],
)  # fmt: skip
def test_a_reader_gets_the_value(schema: ConnectSchema, value: Any, expected: Any) -> None:
    found = _read(_of(schema), {"value": value})["value"]
    assert (str(found) if expected == "nan" else found) == expected


def test_a_schema_has_the_properties_of_the_avro_converter() -> None:
    schema = struct(
        "shop.public.order-items.Value",
        (
            ("id", ConnectSchema(type="int32", default="0")),
            ("note", optional("string")),
            ("state", ConnectSchema(type="string", optional=True, default='"new"')),
            ("price", logical("bytes", "org.apache.kafka.connect.data.Decimal", scale="2")),
            ("day", logical("int32", "org.apache.kafka.connect.data.Date")),
        ),
    )
    assert json.loads(AvroCodec(schema).schema_text) == {
        "type": "record",
        "name": "Value",
        "namespace": "shop.public.order_items",
        "connect.name": "shop.public.order-items.Value",
        "fields": [
            {"name": "id", "type": "int", "default": 0},
            {"name": "note", "type": ["null", "string"], "default": None},
            {"name": "state", "type": ["string", "null"], "default": "new"},
            {
                "name": "price",
                "type": {
                    "type": "bytes",
                    "connect.version": 1,
                    "connect.parameters": {"scale": "2"},
                    "connect.name": "org.apache.kafka.connect.data.Decimal",
                    "logicalType": "decimal",
                    "precision": 64,
                    "scale": 2,
                },
            },
            {
                "name": "day",
                "type": {
                    "type": "int",
                    "connect.version": 1,
                    "connect.name": "org.apache.kafka.connect.data.Date",
                    "logicalType": "date",
                },
            },
        ],
    }


def test_a_record_is_defined_once() -> None:
    row = struct("shop.Value", (("id", scalar("int32")),))
    codec = AvroCodec(struct("shop.Envelope", (("before", row.as_optional()), ("after", row.as_optional()))))
    after = json.loads(codec.schema_text)["fields"][1]
    assert after == {"name": "after", "type": ["null", "shop.Value"], "default": None}
    assert _read(codec, {"before": None, "after": {"id": 1}}) == {"before": None, "after": {"id": 1}}


def test_names_of_columns_become_names_of_avro() -> None:
    fields = tuple((name, scalar("string")) for name in ("first name", "first_name", "1st", "größe"))
    codec = AvroCodec(struct("t.Value", fields))
    assert _read(codec, {name: name for name, _ in fields}) == {
        "first_name": "first name", "first_name_": "first_name", "_1st": "1st", "gr__e": "größe",
    }  # fmt: skip
    assert avro_name("a.b") == "a_b"


def test_a_default_of_bytes_is_text_of_latin_1() -> None:
    codec = _of(ConnectSchema(type="bytes", default='"/w=="'))
    assert json.loads(codec.schema_text)["fields"][0]["default"] == b64decode("/w==").decode("latin-1")
