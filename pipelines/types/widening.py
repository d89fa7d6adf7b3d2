"""Widening: conversions of Arrow arrays to another type that represents every value of the first one exactly.

The second type is a wider number of the same kind, or text as Postgres prints it. Floats are not converted to text,
because only Postgres knows their shortest text. Text is not converted to other types, because a value may not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

ArrayConversion = Callable[[pa.Array], pa.Array]

_DIGITS: Final = {pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_QUOTED: Final = r'\A\z|(?i)\Anull\z|[{},"\\\s\x0b]'
"""Elements that Postgres quotes: empty ones, the word NULL, and those with special characters."""


def widening(before: pa.DataType, after: pa.DataType, *, recast: bool) -> ArrayConversion | None:
    """The conversion of an array from type `before` to type `after`; None if it is not exact for every value.

    recast: the source changed the column's type, so Postgres has cast its values; otherwise only the target's type
    differs.
    """
    if before == after or _widens(before, after):
        return lambda values: values.cast(after)
    if not pa.types.is_string(after):
        return None
    if recast:
        # for other types the cast makes another text than the printed one (`true` of a boolean), or the session decides
        cast_prints = pa.types.is_integer(before) or pa.types.is_decimal(before) or pa.types.is_date(before)
        return to_postgres_text if cast_prints else None
    return to_postgres_text if _printable(before) else None


def to_postgres_text(values: pa.Array) -> pa.Array:
    """Print typed values as Postgres does under the pinned session settings; floats are not supported."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return pc.if_else(values, "t", "f")
    if pa.types.is_decimal(kind):
        # Arrow prints 1E-10, Postgres never does
        return pa.array([None if value is None else format(value, "f") for value in values.to_pylist()], pa.string())
    if pa.types.is_timestamp(kind):
        texts = pc.strftime(values.cast(pa.timestamp("us")), format="%Y-%m-%d %H:%M:%S")
        shortest = pc.utf8_rtrim(pc.utf8_rtrim(texts, "0"), ".")
        return pc.binary_join_element_wise(shortest, "+00" if kind.tz else "", "")
    if pa.types.is_binary(kind):
        return pa.array([None if value is None else "\\x" + value.hex() for value in values.to_pylist()], pa.string())
    if pa.types.is_list(kind):
        return _to_array_literals(values)
    return values.cast(pa.string())


def _widens(before: pa.DataType, after: pa.DataType) -> bool:
    if pa.types.is_integer(before) and pa.types.is_integer(after):
        return bool(before.bit_width <= after.bit_width)
    if before == pa.float32() and after == pa.float64():
        return True
    if not pa.types.is_decimal(after) or (before not in _DIGITS and not pa.types.is_decimal(before)):
        return False
    whole, scale = (_DIGITS[before], 0) if before in _DIGITS else (before.precision - before.scale, before.scale)
    return bool(after.scale >= scale and after.precision - after.scale >= whole)


def _printable(kind: pa.DataType) -> bool:
    return not pa.types.is_floating(kind.value_type if pa.types.is_list(kind) else kind)


def _to_array_literals(lists: pa.Array) -> pa.Array:
    texts = to_postgres_text(lists.flatten())
    escaped = pc.replace_substring_regex(texts, r'(["\\])', r"\\\1")
    quoted = pc.binary_join_element_wise('"', escaped, '"', "")
    spelled = pc.fill_null(pc.if_else(pc.match_substring_regex(texts, _QUOTED), quoted, texts), "NULL")
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    ends = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])
    joined = pc.binary_join(pa.ListArray.from_arrays(ends, spelled), ",")
    texts = pc.binary_join_element_wise("{", joined, "}", "")
    return pc.if_else(lists.is_valid(), texts, None)
