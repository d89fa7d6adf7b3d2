"""Protobuf: the text of the schema describes the content, and nothing is lost that JSON has."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from cdc.delivery.formats.connect_schema import ConnectSchema, logical, optional, scalar, struct
from cdc.delivery.formats.protobuf_codec import ProtobufCodec
from tests.delivery.formats.proto_text import parsed_proto

TEXTS = ConnectSchema(type="array", items=optional("string"))


def read_protobuf(codec: ProtobufCodec, content: bytes) -> Any:
    """The message that a consumer reads with the schema's text."""
    file = parsed_proto(codec.schema_text)
    pool = DescriptorPool()
    pool.Add(file)
    name = f"{file.package}.{file.message_type[0].name}"
    return GetMessageClass(pool.FindMessageTypeByName(name)).FromString(content)


def _read(schema: ConnectSchema, value: Any) -> Any:
    codec = ProtobufCodec(struct("shop.orders.Value", (("value", schema),)))
    return read_protobuf(codec, codec.encode({"value": value}))


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (scalar("int16"), -7, -7),
        (scalar("int64"), 1 << 62, 1 << 62),
        (scalar("boolean"), False, False),
        (scalar("double"), "-Infinity", float("-inf")),
        (scalar("bytes"), "AQID", b"\x01\x02\x03"),
        (logical("string", "io.debezium.data.Json"), "{}", "{}"),
    ],
)
def test_a_reader_gets_the_value(schema: ConnectSchema, value: Any, expected: Any) -> None:
    assert _read(schema, value).value == expected


def test_null_differs_from_zero_and_from_an_empty_list() -> None:
    assert not _read(optional("int32"), None).HasField("value")
    assert _read(optional("int32"), 0).HasField("value")
    assert not _read(TEXTS.as_optional(), None).HasField("value")
    assert _read(TEXTS.as_optional(), []).HasField("value")
    items = _read(TEXTS, ["a", None, ""]).value.items
    assert [one.value if one.HasField("value") else None for one in items] == ["a", None, ""]


def test_maps_are_entries() -> None:
    by_name = ConnectSchema(type="map", keys=scalar("string"), items=optional("string"))
    entries = _read(by_name, {"a": "1", "b": None}).value.items
    assert [(one.key, one.HasField("value")) for one in entries] == [("a", True), ("b", False)]
    by_number = ConnectSchema(type="map", keys=scalar("int16"), items=scalar("double"))
    assert [(one.key, one.value) for one in _read(by_number, [[3, 2.5]]).value.items] == [(3, 2.5)]


def test_the_text_names_messages_once_and_numbers_fields_by_column() -> None:
    row = struct(
        "shop.orders.Value",
        (
            ("id", ConnectSchema(type="int32", number=1)),
            ("first name", ConnectSchema(type="string", optional=True, number=7)),
            ("price", ConnectSchema(
                type="bytes", name="org.apache.kafka.connect.data.Decimal", parameters=(("scale", "2"),), number=3
            )),
        ),
    )  # fmt: skip
    envelope = struct("shop.orders.Envelope", (("before", row.as_optional()), ("after", row.as_optional())))
    assert ProtobufCodec(envelope).schema_text == (
        'syntax = "proto3";\npackage shop.orders;\n\n'
        "message Envelope {\n  Value before = 1; // shop.orders.Value\n  Value after = 2; // shop.orders.Value\n}\n\n"
        "message Value {\n  int32 id = 1;\n  optional string first_name = 7;\n"
        "  bytes price = 3; // org.apache.kafka.connect.data.Decimal scale=2\n}\n"
    )


def test_equal_names_of_different_types_are_different_messages() -> None:
    inner = struct("a.Value", (("x", scalar("int32")),))
    codec = ProtobufCodec(struct("b.Value", (("inner", inner),)))
    assert read_protobuf(codec, codec.encode({"inner": {"x": 5}})).inner.x == 5
    assert "message Value2 {" in codec.schema_text
