r"""Text of jsonb: prints nested values of Spark as Postgres prints a `jsonb` with the same content.

A value inside of an array, a struct or a map becomes what `to_jsonb` of Postgres returns for a value of its type:

- A number keeps its digits and is written without an exponent; NaN and the infinities are strings.
- Dates and timestamps are strings in ISO 8601: `"2026-01-31"`, `"2026-01-31T12:00:00.5"`, with `+00:00` if they have a
  time zone. A year BC ends with ` BC`.
- Bytes are strings as `"\\x00ff"`: the text of bytea.
- NULL is `null`, also in a struct.
- A struct or a map is an object, as of `jsonb_object_agg`: the keys of a map are texts. Keys are in the order of jsonb:
  by length in bytes, then by bytes. Of equal keys the last one stays.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.json_arrays import concatenated, or_null, quote, quoted
from pipelines.types.postgres_text import to_postgres_text

_SEPARATOR: Final = ", "


def is_nested(kind: pa.DataType) -> bool:
    """Return whether values of this type become a jsonb."""
    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind) or pa.types.is_list(kind))


def jsonb_text(values: pa.Array) -> pa.Array:
    """Print values as parts of a jsonb; the result is text, and null for null."""
    kind = values.type
    if pa.types.is_struct(kind):
        return _structs(values)
    if pa.types.is_map(kind):
        return _maps(values)
    if pa.types.is_list(kind):
        return _lists(values)
    if pa.types.is_floating(kind):
        texts = _expanded(to_postgres_text(values))
        return pc.if_else(pc.is_finite(values), texts, quoted(texts))
    texts = plain_text(values)
    return texts if _is_unquoted(kind) else quoted(texts)


def plain_text(values: pa.Array) -> pa.Array:
    """Print scalar values as `to_jsonb` does, without the quotes and escapes of a string; so are the keys of maps."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return pc.if_else(values, "true", "false")
    texts = to_postgres_text(values)
    if pa.types.is_timestamp(kind):
        texts = pc.replace_substring(texts, " ", "T", max_replacements=1)
        return pc.replace_substring(texts, "+00", "+00:00") if kind.tz else texts
    return texts


def _is_unquoted(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind))


def _expanded(texts: pa.Array) -> pa.Array:
    """Return floats as jsonb prints them, whose numbers have neither an exponent nor a negative zero."""
    texts = pc.if_else(pc.equal(texts, "-0"), "0", texts)
    has_exponent = pc.fill_null(pc.match_substring(texts, "e"), False)
    if not pc.any(has_exponent).as_py():
        return texts
    written = [format(Decimal(text), "f") for text in texts.filter(has_exponent).to_pylist()]
    return pc.replace_with_mask(texts, has_exponent, pa.array(written, texts.type))


def _structs(values: pa.StructArray) -> pa.Array:
    places = {field.name: place for place, field in enumerate(values.type)}
    children = values.flatten()
    pieces: list[pa.Array | str] = []
    for name in sorted(places, key=_jsonb_order):
        pieces += [f"{_SEPARATOR if pieces else '{'}{quote(name)}: ", or_null(jsonb_text(children[places[name]]))]
    texts = concatenated([*pieces, "}"]) if pieces else "{}"
    return pc.if_else(values.is_valid(), texts, None)


def _jsonb_order(name: str) -> tuple[int, bytes]:
    key = name.encode()
    return len(key), key


def _lists(values: pa.ListArray) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
    texts = _joined("[", or_null(jsonb_text(values.flatten())), lengths, "]")
    return pc.if_else(values.is_valid(), texts, None)


def _maps(values: pa.MapArray) -> pa.Array:
    rows, keys, items = _entries(values)
    texts = plain_text(keys)
    members = concatenated([quoted(texts), ": ", or_null(jsonb_text(items))])
    entries = pa.table({"row": rows, "length": pc.binary_length(texts), "key": texts})
    order = pc.sort_indices(entries, sort_keys=[(name, "ascending") for name in entries.column_names])
    by_key = entries.take(order)
    is_last = np.ones(len(rows), dtype=bool)
    row, key = by_key.column("row").combine_chunks(), by_key.column("key").combine_chunks()
    is_last[:-1] = pc.or_(pc.not_equal(row[:-1], row[1:]), pc.not_equal(key[:-1], key[1:]))
    lengths = np.bincount(row.to_numpy()[is_last], minlength=len(values))
    objects = _joined("{", members.take(order.filter(pa.array(is_last))), lengths, "}")
    return pc.if_else(values.is_valid(), objects, None)


def _entries(values: pa.MapArray) -> tuple[np.ndarray, pa.Array, pa.Array]:
    """Return the index of the map, the key and the value of each entry, also of maps that are null."""
    offsets = values.offsets.to_numpy() if len(values) else np.zeros(1, np.int32)
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    rows = np.repeat(np.arange(len(values)), np.diff(offsets))
    return rows, values.keys.slice(first, count), values.items.slice(first, count)


def _joined(start: str, texts: pa.Array, lengths: np.ndarray, end: str) -> pa.Array:
    """Join neighbouring texts with commas between them; lengths: how many for each element of the result."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), texts)
    return concatenated([start, pc.binary_join(lists, pa.scalar(_SEPARATOR, texts.type)), end])
