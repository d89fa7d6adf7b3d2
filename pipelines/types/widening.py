"""Widening: values of one column type as another, where every value of the first has exactly one in the second.

That is a wider number of the same kind, and text as Postgres prints it. Floats have no text here: their shortest
spelling is Postgres' own. Nothing is read back from text: whether it fits is known only when it was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

Conversion = Callable[[pa.Array], pa.Array]

_DIGITS: Final = {pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_QUOTED: Final = r'\A\z|(?i)\Anull\z|[{},"\\\s\x0b]'
"""Elements that Postgres quotes: empty ones, the word NULL, and those with signs that mean something."""


def widening(before: pa.DataType, after: pa.DataType, *, recast: bool) -> Conversion | None:
    """What makes an array of `before` one of `after`, None where that is not exact for every value.

    recast: the source changed the column's type, so its values went through Postgres' own cast; else the column is
    the same there and only this side holds it in another type.
    """
    if before == after or _widens(before, after):
        return lambda values: values.cast(after)
    if not pa.types.is_string(after):
        return None
    if recast:
        # of others the cast's text is not the printed one (a boolean's is `true`), or depends on the session
        same = pa.types.is_integer(before) or pa.types.is_decimal(before) or pa.types.is_date(before)
        return printed if same else None
    return printed if _printable(before) else None


def printed(values: pa.Array) -> pa.Array:
    """Typed values as Postgres prints them under the pinned session settings; of any type but floats."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return pc.if_else(values, "t", "f")
    if pa.types.is_decimal(kind):
        # Arrow spells 1E-10, Postgres never does
        return pa.array([None if value is None else format(value, "f") for value in values.to_pylist()], pa.string())
    if pa.types.is_timestamp(kind):
        texts = pc.strftime(values.cast(pa.timestamp("us")), format="%Y-%m-%d %H:%M:%S")
        shortest = pc.utf8_rtrim(pc.utf8_rtrim(texts, "0"), ".")
        return pc.binary_join_element_wise(shortest, "+00" if kind.tz else "", "")
    if pa.types.is_binary(kind):
        return pa.array([None if value is None else "\\x" + value.hex() for value in values.to_pylist()], pa.string())
    if pa.types.is_list(kind):
        return _arrays(values)
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


def _arrays(lists: pa.Array) -> pa.Array:
    texts = printed(lists.flatten())
    escaped = pc.replace_substring_regex(texts, r'(["\\])', r"\\\1")
    quoted = pc.binary_join_element_wise('"', escaped, '"', "")
    spelled = pc.fill_null(pc.if_else(pc.match_substring_regex(texts, _QUOTED), quoted, texts), "NULL")
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    ends = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])
    joined = pc.binary_join(pa.ListArray.from_arrays(ends, spelled), ",")
    texts = pc.binary_join_element_wise("{", joined, "}", "")
    return pc.if_else(lists.is_valid(), texts, None)
