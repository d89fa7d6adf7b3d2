"""Plain schemas: no view type is left at any depth, and everything else stays."""

from __future__ import annotations

import pyarrow as pa

from pipelines.sinks.delta.indexed.plain_schema import plain_schema

NESTED = pa.schema(
    [
        pa.field("text", pa.string_view(), metadata={"id": "1"}),
        pa.field("bytes", pa.binary_view()),
        pa.field("list", pa.list_(pa.field("item", pa.string_view(), nullable=False))),
        pa.field("map", pa.map_(pa.string_view(), pa.list_(pa.binary_view()))),
        pa.field("struct", pa.struct([("a", pa.string_view()), ("b", pa.int64())]), nullable=False),
        pa.field("n", pa.int64()),
    ]
)


def test_a_plain_schema_has_no_view_types_at_any_depth() -> None:
    plain = plain_schema(NESTED)

    assert "view" not in str(plain.types)
    assert (plain.names, plain_schema(plain)) == (NESTED.names, plain)
    assert [field.nullable for field in plain] == [field.nullable for field in NESTED]
    assert (plain[0].metadata, plain.field("list").type.value_field.nullable) == ({b"id": b"1"}, False)
    assert plain.types == [
        pa.string(),
        pa.binary(),
        pa.list_(pa.field("item", pa.string(), nullable=False)),
        pa.map_(pa.string(), pa.list_(pa.binary())),
        pa.struct([("a", pa.string()), ("b", pa.int64())]),
        pa.int64(),
    ]
