"""Avro of whole columns: the content that AvroCodec writes for each value, about six times faster.

The JSON of all events becomes one table of Arrow, each of its columns becomes Avro, and the columns are joined. It is
for schemas of structs and scalars. Arrays and maps, and values that Arrow does not read as the schema says, such as
`NaN`, are left to AvroCodec.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from cdc.delivery.formats.connect_schema import ConnectSchema

_TYPES: Final = {
    "boolean": pa.bool_(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float64(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.string(),
}
"""Type of Connect → type of Arrow for its JSON; bytes are base64."""
_EMPTY: Final = pa.scalar(b"", pa.binary())
_LONGEST: Final = 10
"""Bytes of the longest integer."""
MOST_BYTES: Final = 1 << 30
"""Bytes of JSON above which the content may not fit into one array."""


def avro_columns(texts: pa.Array, schema: ConnectSchema, start: bytes) -> pa.Array | None:
    """Return `start` and the Avro of each JSON text; None if the values are left to AvroCodec. texts: without null."""
    if not len(texts) or schema.type != "struct" or not _is_supported(schema) or texts.nbytes > MOST_BYTES:
        return None
    lines = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts), "\n")[0].as_buffer()
    options = arrow_json.ParseOptions(
        explicit_schema=pa.schema([(name, _type(field)) for name, field in schema.fields]),
        unexpected_field_behavior="error",
    )
    reading = arrow_json.ReadOptions(use_threads=False, block_size=lines.size + 1)
    try:
        table = arrow_json.read_json(pa.BufferReader(lines), reading, options)
    except pa.ArrowInvalid:
        return None
    columns = [table.column(name).combine_chunks() for name, _ in schema.fields]
    if table.num_rows != len(texts):
        return None
    pieces = [_field(column, field) for column, (_, field) in zip(columns, schema.fields, strict=True)]
    found = pc.binary_join_element_wise(pa.scalar(start, pa.binary()), *pieces, _EMPTY)
    return None if found.null_count else found  # a required value is missing


def _is_supported(schema: ConnectSchema) -> bool:
    if schema.type == "struct":
        return bool(schema.fields) and all(_is_supported(field) for _, field in schema.fields)
    return schema.type in _TYPES


def _type(schema: ConnectSchema) -> pa.DataType:
    if schema.type == "struct":
        return pa.struct([(name, _type(field)) for name, field in schema.fields])
    return _TYPES[schema.type]


def _field(values: pa.Array, schema: ConnectSchema) -> pa.Array:
    """Return the Avro of a field, null where a required value is missing. An optional one begins with its branch."""
    content = _struct(values, schema) if schema.type == "struct" else _scalar(values, schema)
    if not schema.optional:
        return content
    null, some = (b"\x02", b"\x00") if schema.default is not None else (b"\x00", b"\x02")
    whole = pc.binary_join_element_wise(pa.scalar(some, pa.binary()), content, _EMPTY)
    return pc.if_else(values.is_valid(), whole, pa.scalar(null, pa.binary()))


def _struct(values: pa.StructArray, schema: ConnectSchema) -> pa.Array:
    pieces = [_field(column, field) for column, (_, field) in zip(values.flatten(), schema.fields, strict=True)]
    joined = pc.binary_join_element_wise(*pieces, _EMPTY)
    return pc.if_else(values.is_valid(), joined, pa.scalar(None, pa.binary())) if values.null_count else joined


def _scalar(values: pa.Array, schema: ConnectSchema) -> pa.Array:
    if schema.type in {"string", "bytes"}:
        content = values.cast(pa.binary())
        if schema.type == "bytes":
            content = pa.array([None if one is None else b64decode(one) for one in values.to_pylist()], pa.binary())
        lengths = pc.fill_null(pc.binary_length(content), 0).to_numpy(zero_copy_only=False)
        return pc.binary_join_element_wise(_integers(lengths.astype(np.int64)), content, _EMPTY)
    if schema.type == "boolean":
        return pc.if_else(values, pa.scalar(b"\x01", pa.binary()), pa.scalar(b"\x00", pa.binary()))
    numbers = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
    if schema.type in {"float", "double"}:
        found = _fixed(numbers.astype("<f4" if schema.type == "float" else "<f8"))
    else:
        found = _integers(numbers.astype(np.int64))
    return pc.if_else(values.is_valid(), found, pa.scalar(None, pa.binary())) if values.null_count else found


def _integers(numbers: np.ndarray) -> pa.Array:
    """Return integers as Avro writes them: zigzag, then seven bits in each byte, the lowest first."""
    rest = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    digits = np.zeros((len(numbers), _LONGEST), np.uint8)
    sizes = np.ones(len(numbers), np.int32)
    for place in range(_LONGEST):
        digits[:, place] = (rest & np.uint64(0x7F)).astype(np.uint8)
        rest >>= np.uint64(7)
        if not rest.any():
            break
        digits[rest > 0, place] |= 0x80
        sizes[rest > 0] += 1
    return _binary(digits[np.arange(_LONGEST) < sizes[:, None]].tobytes(), sizes)


def _fixed(numbers: np.ndarray) -> pa.Array:
    return _binary(numbers.tobytes(), np.full(len(numbers), numbers.itemsize, np.int32))


def _binary(content: bytes, sizes: np.ndarray) -> pa.Array:
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(content)])
