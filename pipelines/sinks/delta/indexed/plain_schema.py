"""Plain schemas: types of Arrow without views, which delta-rs writes and pyarrow cannot filter."""

from __future__ import annotations

import pyarrow as pa


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema without view types (string_view → string), which delta-rs writes and pyarrow cannot filter."""
    return pa.schema([field.with_type(_plain(field.type)) for field in schema])


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(
            kind.key_field.with_type(_plain(kind.key_type)), kind.item_field.with_type(_plain(kind.item_type))
        )
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    return kind
